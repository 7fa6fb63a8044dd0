"""Server-sent events: the response that carries them, one write per chunk."""

from __future__ import annotations

import asyncio

from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that buffers would turn a stream into one late answer
}


class EventStream:
    """Begun by its first write, so that what fails before still gets a status of its own."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.headers = dict(HEADERS)  # more may be added until it begins
        self._response: web.StreamResponse | None = None
        self._beginning = asyncio.Lock()  # choices of one answer may write their first at a time

    @property
    def begun(self) -> bool:
        return self._response is not None

    async def write(self, data: bytes) -> None:
        """Returns when the client is not too far behind."""
        response = await self._begin()
        if data:
            await response.write(data)

    async def end(self, data: bytes) -> web.StreamResponse:
        """The last write."""
        response = await self._begin()
        await response.write_eof(data)
        return response

    async def _begin(self) -> web.StreamResponse:
        async with self._beginning:
            if self._response is None:
                self._response = web.StreamResponse(headers=self.headers)
                await self._response.prepare(self._request)
        return self._response
