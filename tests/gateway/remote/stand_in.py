"""A server of somebody else's kind, for tests: completions over HTTP, and real ZeroMQ sockets that publish
the bytes they are given. It makes token ids n, n+1, ... behind a prompt that ends in n-1."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

END = (-1).to_bytes(8, "big", signed=True)


class StandIn:
    def __init__(self, *, ids: bool = True, cached: bool = True, context: int | None = 1000) -> None:
        self.ids = ids  # whether it knows `return_token_ids`
        self.report = cached  # whether it says what it found in its cache
        self.context = context
        self.asked: list[dict[str, Any]] = []  # bodies of generations, in order
        self.headers: list[dict[str, str]] = []
        self.gone = 0  # clients that left before their answers' ends
        self.cached = 0  # what it says next
        self.healthy = True
        self.refuse: tuple[int, Any] | None = None  # status and body of the next answers
        self.cut_after: int | None = None  # tokens after which a connection is cut
        self.cuts = 1_000_000  # times that it does
        self.pace = 0.0  # seconds per token
        self.stop: tuple[int, bool] | None = None  # a stop token behind three others, and whether it shows
        self.metrics = ""
        self._server: TestServer | None = None

    async def start(self, port: int | None = None) -> StandIn:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        self._server = TestServer(app, host="127.0.0.1", port=port)
        await self._server.start_server()
        return self

    @property
    def port(self) -> int:
        assert self._server is not None and self._server.port is not None
        return self._server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "a-model"} | ({"max_model_len": self.context} if self.context else {})
        return web.json_response({"data": [card]}, status=200 if self.healthy else 500)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 500)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

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

        count, last = body["max_tokens"], body["prompt"][-1]
        made = [last + 1 + n for n in range(count if self.stop is None else 3)]
        for n, token in enumerate(made):
            await asyncio.sleep(self.pace)
            if n == self.cut_after and self.cuts:
                self.cuts -= 1
                assert request.transport is not None
                request.transport.abort()
                return
            final = self.stop is None and n == len(made) - 1
            choice: dict[str, Any] = {
                "index": 0,
                "text": f" {token}",
                "finish_reason": "length" if final else None,
            }
            if self.ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            await say({"choices": [choice]})
        if self.stop is not None:
            token, shows = self.stop
            choice = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": token}
            if self.ids:
                choice["token_ids"] = [token] if shows else []
            await say({"choices": [choice]})
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
        usage["completion_tokens"] = len(made) + (self.stop is not None)
        if self.report:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        await say({"choices": [], "usage": usage})
        await say("[DONE]")
        await response.write_eof()


class Publisher:
    """PUB and ROUTER, as vLLM has them; `long` with the topic in its replays, as newer ones."""

    def __init__(self, folder: Any, long: bool = True) -> None:
        self.events, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.kept: list[tuple[int, bytes]] = []
        self._long = long
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # which says who subscribes
        self._pub.bind(self.events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay)
        self._task = asyncio.get_running_loop().create_task(self._answer())

    async def subscribed(self) -> None:
        async with asyncio.timeout(20):
            await self._pub.recv()

    async def publish(self, seq: int, payload: bytes, *, keep: bool = True, send: bool = True) -> None:
        if keep:
            self.kept.append((seq, payload))
        if send:
            await self._pub.send_multipart([b"kv@here", seq.to_bytes(8, "big"), payload])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            topic = [b"kv@here"] if self._long else []
            for seq, payload in self.kept:
                if seq >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([client, b"", *topic, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", *([b""] if self._long else []), END, b""])
