"""The same over HTTP, on a real clock: no figure is looked at, only what was asked and understood."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from bien.core.architectures.registry import read_architecture
from bien.core.clock import WallClock
from bien.core.costs.machine import load_machine
from bien.core.costs.step import StepModel
from bien.core.errors import BienError, ResourceError, UserError
from bien.core.request import BlockRuns, TokenIds
from bien.replay.calibrate import remote
from bien.replay.calibrate.probes import Batch
from bien.replay.calibrate.remote import Seen, observe
from bien.replay.record import TurnRecord
from bien.replay.target import TurnRequest
from tests.replay.calibrate.stand_in import StandIn

VOCABULARY = 900


class Server:
    """`async with Server() as server`: vLLM's completions and metrics before a `StandIn`."""

    def __init__(
        self,
        engine: str = "vllm",
        models: int = 1,
        info: dict[str, Any] | None = None,
        vocabulary: int = VOCABULARY,
        context: int = 512,
    ) -> None:
        self.vocabulary, self.context = vocabulary, context
        self.stand_in = StandIn(WallClock(), engine)
        machine = load_machine("h200")
        self.stand_in.model = StepModel(read_architecture("smollm2-135m", 16, "bfloat16"), machine)
        self.stand_in.sent = lambda record: self._queues[record.id].put_nowait(record.got)
        self._queues: dict[str, asyncio.Queue[int]] = {}
        self.bodies: list[dict[str, Any]] = []
        self._models_, self._info = models, info
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        if info is not None:
            app.router.add_get("/server_info", self._server_info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> Server:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "m", "owned_by": "vllm", "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [model] * self._models_})

    async def _metrics(self, request: web.Request) -> web.Response:
        page = await self.stand_in.metrics()
        return web.Response(text=page) if page else web.Response(status=404)

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self._info)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if max(body["prompt"]) >= self.vocabulary:
            message = f"Token id {max(body['prompt'])} is out of vocabulary"
            return web.json_response({"error": {"message": message}}, status=400)
        record = TurnRecord("", 0, 0, id=str(len(self.bodies)))
        queue = self._queues[record.id] = asyncio.Queue()
        output = BlockRuns.of([(0, body["max_tokens"])])
        prompt: Any = TokenIds.of(body["prompt"])
        task = asyncio.create_task(self.stand_in.enqueue(TurnRequest("", "", "", "", prompt, output), record))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        got = 0
        while got < body["max_tokens"]:
            got = await queue.get()
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": got,
                "prompt_tokens_details": {"cached_tokens": record.cached},
            }
            event = {"choices": [{"index": 0, "text": "x"}], "usage": usage}
            await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
        await task
        await response.write(b"data: [DONE]\n\n")
        return response


async def ask(server: Server, url: str = "", **options: Any) -> tuple[Seen, list[Batch]]:
    asked: list[Batch] = []

    def on_batch(batch: Batch, done: int, total: int) -> None:
        assert 0 <= done < total
        asked.append(batch)

    options = {"vocab_size": VOCABULARY, "tokens": 1000, "context": 4096, "sessions": 2} | options
    return await observe(url or server.url, on_batch, **options), asked


async def test_a_server_is_observed() -> None:
    async with Server() as server:
        found, asked = await ask(server)
        again, _ = await ask(server)
    assert (found.engine, found.model) == ("vllm", "m")
    steps = [s for o in found.observed for s in o.steps]
    assert any(s.starts == (0,) and s.tokens >= 128 for s in steps)
    assert any(s.starts[0] >= 128 and s.rows == 1 and s.tokens > 1 for s in steps)
    assert {b.sessions for b in asked} == {1, 2}
    assert all(b["ignore_eos"] and b["temperature"] == 0 and b["stream"] for b in server.bodies)
    # It found room for 512 tokens, and stayed within.
    assert max(len(b["prompt"]) + b["max_tokens"] for b in server.bodies) <= 512
    # Content is new in each run: nothing of the second is cached by the first.
    cold = [s for o in again.observed for s in o.steps if s.starts == (0,) and s.tokens >= 128]
    assert cold


async def test_a_server_without_metrics_is_observed_and_said_to_be_unchecked() -> None:
    async with Server("") as server:
        found, _ = await ask(server)
    assert found.engine == "" and any("could be checked" in note for note in found.notes)
    assert any(o.requests and o.steps for o in found.observed)


@pytest.mark.parametrize(("stated", "known"), [(256, True), (-1, False)])
async def test_sglang_says_how_large_its_chunks_are(stated: int, known: bool) -> None:
    async with Server("sglang", info={"chunked_prefill_size": stated}) as server:
        server.stand_in.chunk = 256
        found, _ = await ask(server)
    assert known is not any("--chunk" in note for note in found.notes)


async def test_tokens_that_the_model_does_not_have_are_named() -> None:
    async with Server() as server:
        with pytest.raises(BienError, match=r"a probe of 48 tokens failed: HTTP 400: Token id \d+ is out of"):
            await ask(server, vocab_size=100_000)


async def test_a_server_that_stops_writing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENCE", 0.1)
    async with Server() as server:
        server.stand_in.sent = lambda record: None
        with pytest.raises(BienError, match=r"48 tokens failed: the server said nothing for 0.1 s"):
            await ask(server)


async def test_nothing_to_observe() -> None:
    async with Server(models=0) as server:
        with pytest.raises(UserError, match="serves no model"):
            await ask(server)
        url = server.url
    with pytest.raises(ResourceError, match="nothing listens there"):
        await ask(server, url)
    with pytest.raises(UserError, match="--url is 'localhost'"):
        await ask(server, "localhost")
