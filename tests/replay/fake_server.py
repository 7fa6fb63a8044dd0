"""A small OpenAI-style server that speaks the dialects a replay may meet."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from aiohttp import web

from bien.core.request import TokenIds

METRICS = 'bien_worker_busy_seconds{worker="w0"} 3.0\nbien_worker_busy_seconds{worker="w1"} 1.0\n'


class FakeServer:
    """`async with FakeServer() as server`: use server.url. `requests` holds the bodies it got."""

    def __init__(self, *, ours: bool = True, delay: float = 0.0, fail_after: int | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.left = 0  # clients that left in the middle
        self._ours, self._delay, self._fail_after = ours, delay, fail_after
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def __aenter__(self) -> FakeServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "fake", "owned_by": "bien" if self._ours else "vllm", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        if body["max_tokens"] == 13:
            return web.json_response({"error": {"message": "13 is refused"}}, status=503)
        headers = {"Content-Type": "text/event-stream"}
        if self._ours:
            headers |= {"x-bien-worker": "w1", "x-bien-predicted-cached-tokens": "32"}
            prompt = len(base64.b64decode(body["prompt_token_ids_b64"])) // 4
        else:
            prompt = len(body["prompt"])
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            await self._stream(response, body, prompt)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], prompt: int) -> None:
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": 16}}
        forced = TokenIds(base64.b64decode(body.get("trace_decode_token_ids_b64", ""))).ids()
        for n in range(1, body["max_tokens"] + 1):
            await asyncio.sleep(self._delay)
            if n == self._fail_after:
                await self._send(response, {"error": {"message": "worker died"}})
                return
            choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": None}
            if body.get("return_token_ids"):
                choice["token_ids"] = [forced[n - 1]]
            chunk: dict[str, Any] = {"choices": [choice]}
            if body["stream_options"].get("continuous_usage_stats"):
                chunk["usage"] = usage | {"completion_tokens": n}
            await self._send(response, chunk)
        if self._ours:
            end = {"index": 0, "text": "", "finish_reason": "length"}
            counts = {"drafted": 4, "accepted": 3, "rounds": 2, "drafted_at": [2, 2], "accepted_at": [2, 1]}
            await self._send(response, {"choices": [end], "bien": counts | {"sources": {"own": counts}}})
        await self._send(response, {"choices": [], "usage": usage | {"completion_tokens": n}})
        await response.write_eof(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, value: object) -> None:
        await response.write(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")
