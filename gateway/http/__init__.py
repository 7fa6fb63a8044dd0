"""The thin aiohttp shell around the gateway's core."""
