"""`StandIn`: a server of somebody else's kind: models, health, metrics, and generations over HTTP.

By itself it finds in its cache what it is told to, and writes token ids n, n+1, ... behind a prompt that ends
in n-1; a subclass may have a cache, a template and words of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from bien.core.clock import WallClock


class StandIn:
    def __init__(self, *, ids: bool = True, cached: bool = True, context: int | None = 1000) -> None:
        self.ids = ids  # whether it knows `return_token_ids`
        self.report = cached  # whether it says what it found in its cache
        self.context = context
        self.name = "a-model"
        self.asked: list[dict[str, Any]] = []  # bodies of generations, in order
        self.headers: list[dict[str, str]] = []
        self.gone = 0  # clients that left before their answers' ends
        self.cached = 0  # what it says next
        self.healthy = True
        self.refuse: tuple[int, Any] | None = None  # status and body of the next answers
        self.cut_after: int | None = None  # tokens after which a connection is cut
        self.cuts = 1_000_000  # times that it does
        self.pace = 0.0  # seconds per token
        self.hold_at: int | None = None  # tokens after which an answer waits until it is released
        self.released = asyncio.Event()
        self.says_at: tuple[int, bytes] | None = None  # after so many tokens an answer is this, and over
        self.hung = False  # whether it answers nothing small any more: models, health, metrics
        self.stop: tuple[int, bool] | None = None  # a stop token behind three others, and whether it shows
        self.metrics = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int | None = None) -> StandIn:
        app = web.Application(client_max_size=64 << 20)
        self.routes(app.router)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port or 0).start()
        return self

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self._models)
        router.add_get("/health", self._health)
        router.add_get("/metrics", self._metrics)
        router.add_post("/v1/completions", self._complete)

    @property
    def port(self) -> int:
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # What a subclass may do its own way.

    def read(self, body: dict[str, Any]) -> list[int]:
        """The ids of the prompt."""
        return list(body["prompt"])

    def length(self, body: dict[str, Any]) -> int:
        """Tokens of the answer."""
        return int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)

    def page(self) -> str:
        """Of /metrics."""
        return self.metrics

    async def prefill(self, body: dict[str, Any], ids: list[int]) -> int:
        """Compute the prompt. Returns the tokens of it that were cached."""
        return self.cached

    def write(self, ids: list[int], count: int) -> Sequence[tuple[int, str]]:
        """The answer: token ids and their texts."""
        return [(ids[-1] + 1 + n, f" {ids[-1] + 1 + n}") for n in range(count)]

    async def over(self, body: dict[str, Any], ids: list[int], made: list[int]) -> None:
        """An answer has ended, or its reader has left."""

    # HTTP.

    async def _models(self, request: web.Request) -> web.Response:
        await self._small()
        card = {"id": self.name} | ({"max_model_len": self.context} if self.context else {})
        return web.json_response({"object": "list", "data": [card]}, status=200 if self.healthy else 500)

    async def _health(self, request: web.Request) -> web.Response:
        await self._small()
        return web.Response(status=200 if self.healthy else 500)

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._small()
        return web.Response(text=self.page())

    async def _small(self) -> None:
        while self.hung:
            await WallClock().sleep(0.01)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.refuse is not None:
            status, said = self.refuse
            return web.json_response(said, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            await self._stream(response, request, body)
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone += 1
            raise
        return response

    async def _stream(self, response: web.StreamResponse, request: web.Request, body: Any) -> None:
        async def say(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"data: {text}\n\n".encode())

        ids, made = self.read(body), list[int]()
        try:
            cached = await self.prefill(body, ids)
            words = self.write(ids, self.length(body) if self.stop is None else 3)
            for n, (token, text) in enumerate(words):
                await WallClock().sleep(self.pace)
                if n == self.hold_at:
                    await self.released.wait()
                if self.says_at is not None and n == self.says_at[0]:
                    await response.write(self.says_at[1])
                    await response.write_eof()
                    return
                if n == self.cut_after and self.cuts:
                    self.cuts -= 1
                    assert request.transport is not None
                    request.transport.abort()
                    return
                made.append(token)
                final = self.stop is None and n == len(words) - 1
                choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if final else None}
                choice |= self.said(body, text)
                if self.ids and body.get("return_token_ids"):
                    choice["token_ids"] = [token]
                await say(self.head(body) | {"choices": [choice]})
        finally:
            await self.over(body, ids, made)
        if self.stop is not None:
            token, shows = self.stop
            choice = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": token}
            if self.ids:
                choice["token_ids"] = [token] if shows else []
            await say({"choices": [choice]})
        usage = self.usage(len(ids), len(made) + (self.stop is not None), cached)
        await say(self.head(body) | {"choices": [], "usage": usage})
        await say("[DONE]")
        await response.write_eof()

    def head(self, body: dict[str, Any]) -> dict[str, Any]:
        """What each event begins with."""
        return {}

    def said(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        return {"text": text}

    def usage(self, prompt: int, made: int, cached: int) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": made}
        found["total_tokens"] = prompt + made
        if self.report:
            found["prompt_tokens_details"] = {"cached_tokens": cached}
        return found
