"""A real server on a free loopback port over a gateway that plays a script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry

from bien.core.errors import OverloadError
from bien.core.request import GenerateRequest, TokenIds
from bien.core.testing.text import CHATML, byte_level
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.core.text.tokenizer import Tokenizer
from bien.core.worker.messages import Output
from bien.gateway.http.app import make_app
from bien.gateway.http.server import Server, serve

AGAIN = ("again",)  # a step: a worker died, and all comes again
Step = str | list[int] | Output | asyncio.Event | Exception | tuple[str]


@dataclass
class FakeGateway:
    """Plays `script`: a text or ids is one output (the last one carries `finish`), an event is waited
    for, an error is raised. Notes what it saw."""

    tokenizer: Tokenizer
    script: Sequence[Step] = ()
    finish: str = "length"
    cached: int = 0
    ready: bool = True
    places: int = 1000
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever a generation is over
    waiting: asyncio.Event = field(default_factory=asyncio.Event)  # set when a script waits
    held: int = 0
    endless: bool = False  # the script begins again after its end
    produced: int = 0

    def admit(self, places: int = 1) -> FakeSlot:
        if self.held >= self.places:
            raise OverloadError("all places are taken", retry_after=2.5)
        self.held += 1
        return FakeSlot(self)

    def generate(self, request: GenerateRequest, slot: Any = None, restart: Any = None) -> FakeGeneration:
        assert isinstance(slot, FakeSlot), "no slot was taken"
        self.requests.append(request)
        return FakeGeneration(self, request, restart)

    def text(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids())


@dataclass
class FakeSlot:
    gateway: FakeGateway

    def __enter__(self) -> FakeSlot:
        return self

    def __exit__(self, *_: object) -> None:
        self.gateway.held -= 1


@dataclass
class FakeGeneration:
    gateway: FakeGateway
    request: GenerateRequest
    restart: Any = None
    done: bool = False

    async def __aenter__(self) -> AsyncIterator[Output]:
        return self._outputs()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.gateway.ended if self.done else self.gateway.aborted).append(self.request.id)
        self.gateway.left.set()

    async def _outputs(self) -> AsyncIterator[Output]:
        first = True
        script = list(self.gateway.script)
        steps = itertools.cycle(script) if self.gateway.endless else script
        for n, step in enumerate(steps):
            if isinstance(step, asyncio.Event):
                self.gateway.waiting.set()
                await step.wait()
                continue
            if step == AGAIN:
                self.restart()
                first = True
                continue
            if isinstance(step, Exception):
                self.done = True
                raise step
            output = self._output(step)
            self.gateway.produced += 1
            if n == len(script) - 1 and not self.gateway.endless:
                output.finish = self.gateway.finish
                self.done = True
            if first:
                output.cached, first = self.gateway.cached, False
            yield output

    def _output(self, step: Any) -> Output:
        if isinstance(step, Output):
            return step
        ids = self.gateway.text(step) if isinstance(step, str) else step
        return Output(1, len(ids), TokenIds.of(ids).packed)


@pytest.fixture
def fake() -> FakeGateway:
    return FakeGateway(Tokenizer(byte_level()), ["he", "llo", " wor", "ld"])


Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start(fake: FakeGateway) -> AsyncIterator[Start]:
    """Starts servers over `fake`; keywords go to `make_app`."""
    servers: list[Server] = []

    async def run(**options: Any) -> Server:
        options = {"max_context": 200, "registry": CollectorRegistry(), "epoch": lambda: 1e9, **options}
        text = options.pop("text", None) or TextModel(fake.tokenizer, ChatTemplate(CHATML))
        app = make_app(fake, text, "toy", **options)
        servers.append(await serve(app, "127.0.0.1", 0))
        return servers[-1]

    yield run
    for server in servers:
        await server.close()


@pytest.fixture
async def server(start: Start) -> Server:
    return await start()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


@pytest.fixture
async def sdk(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        yield client
