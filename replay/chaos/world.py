"""`World`: engines that misbehave by order, and routers in front of them: ours, or the one that was given."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp
import psutil

from bien.core.clock import WallClock
from bien.core.deployment import Deployment
from bien.core.errors import ResourceError, UserError
from bien.core.testing.toy import write_toy
from bien.core.text.model import TextModel
from bien.replay.chaos.ask import Prompts
from bien.replay.chaos.case import NotApplicable
from bien.replay.chaos.engine import CONTEXT, ChaosEngine, Habits, Served
from bien.replay.chaos.gateways import Fleet, Running, Start, before_engines, changed, start_process
from bien.replay.chaos.router import Router, until

ENGINES = 3
MOST_PORT = 65535
EVENTS, REPLAY = 1000, 2000  # ports above an engine's own, where its events are
NAME = "chaos"
EARLY = 6  # prompts that engines hold before a given router starts
GOOD = Habits()
WAIT = 120.0  # seconds for a given router


class World:
    """Made by `own_world` or `given_world`."""

    def __init__(self, folder: Path, text: TextModel, http: aiohttp.ClientSession, seed: int) -> None:
        self.engines: list[ChaosEngine] = []
        self.prompts = Prompts(random.Random(seed))
        self.early: list[list[dict[str, str]]] = []  # what engines held before the given router started
        self.http = http
        self.given: Router | None = None
        self.gateway: dict[str, Any] = {}  # fields of our gateways' deployments
        self.index: dict[str, Any] = {}  # parameters of the fleet's index
        self.start: Start = start_process
        self.text = text
        self._folder = folder
        self._fleet: Fleet | None = None
        self._kept: dict[str, Running] = {}  # our gateways that go on from case to case, by deployment
        self._opened = AsyncExitStack()

    @property
    def own(self) -> bool:
        return self.given is None

    @asynccontextmanager
    async def router(
        self,
        habits: Habits | Sequence[Habits] | None = None,
        *,
        replay: bool = True,
        canary: bool = False,
        again: bool = False,
        fresh: bool = False,
        **gateway: Any,
    ) -> AsyncIterator[Router]:
        """A router in front of engines of these habits. Of ours, the one of the last case, or with `fresh`
        one of its own; without `replay` it cannot ask for earlier events. `again`: a fresh one, and the
        engines go on as they are. NotApplicable: the given router cannot be changed so."""
        if not again:
            habits = habits or GOOD
            each = [habits] * len(self.engines) if isinstance(habits, Habits) else habits
            for engine, its in zip(self.engines, each, strict=True):
                await engine.become(its)
        if self.given is not None:
            if again or canary or gateway:
                raise NotApplicable("it needs a gateway of its own")
            await self.given.settle()
            yield self.given
            return
        deployment = before_engines(self._folder, self.engines, self.gateway | gateway, replay=replay)
        async with self._running(deployment, False, fresh or again or not replay, canary) as running:
            router = Router(running.url, self._folder.name, self.http, self.engines, True, running.pid)
            await router.settle()
            yield router

    async def fleet(self) -> Fleet:
        """Real workers and a Redis, the same ones for all cases. NotApplicable: the router is not ours."""
        if not self.own:
            raise NotApplicable("it looks into our own workers and Redis")
        if self._fleet is None:
            self._fleet = await Fleet.start(self._folder, self.gateway, self.index)
            self._opened.push_async_callback(self._fleet.stop)
        return self._fleet

    @asynccontextmanager
    async def before(self, fleet: Fleet, *, fresh: bool = False, **gateway: Any) -> AsyncIterator[Router]:
        """A gateway of ours before its workers; `fresh`: not the one of the last case."""
        async with self._running(changed(fleet.deployment, **gateway), True, fresh) as running:
            yield Router(running.url, self._folder.name, self.http, [], True, running.pid)

    @asynccontextmanager
    async def _running(
        self, deployment: Deployment, attach: bool, fresh: bool, canary: bool = False
    ) -> AsyncIterator[Running]:
        key = repr((deployment, attach, canary))
        running = None if fresh else self._kept.get(key)
        if running is None:
            before = [engine.subscribers for engine in self.engines]
            running = await self.start(deployment, attach, canary)
            if not fresh:
                self._kept[key] = running
                self._opened.push_async_callback(running.stop)

            async def heard() -> bool:
                counts = zip(self.engines, before, strict=True)
                return all(engine.subscribers > count for engine, count in counts)

            if not attach:
                await until(10.0, heard)
        try:
            yield running
        finally:
            if fresh:
                await running.stop()

    def held(self, messages: list[dict[str, str]]) -> Served:
        """A prompt as a router sends it that passes messages on."""
        return Served(self.engines[0].read({"messages": messages}), "", 0)

    async def close(self) -> None:
        await self._opened.aclose()


@asynccontextmanager
async def own_world(folder: Path, *, start: Start = start_process, seed: int = 0) -> AsyncIterator[World]:
    """`folder`: empty, for sockets and the model."""
    async with _world(folder, seed) as world:
        world.start = start
        for n in range(ENGINES):
            addresses = f"ipc://{folder}/{n}.events", f"ipc://{folder}/{n}.replay"
            await _open(world, ChaosEngine(n, world.text, *addresses))
        yield world


@asynccontextmanager
async def given_world(
    folder: Path, url: str, workers: Sequence[str], *, seed: int = 0
) -> AsyncIterator[World]:
    """Stand-in engines at the URLs that the router at `url` has for its workers; events are published so many
    ports above. UserError: no such URL. ResourceError: a port is taken, or the router does not answer."""
    _parts(url, "--url")
    places = [_port(worker, "--workers") for worker in workers]
    if len(places) < 2:
        raise UserError(f"--workers has {len(places)} URLs; valid: two or more, with commas between")
    async with _world(folder, seed) as world:
        for n, port in enumerate(places):
            addresses = f"tcp://127.0.0.1:{port + EVENTS}", f"tcp://127.0.0.1:{port + REPLAY}"
            try:
                await _open(world, ChaosEngine(n, world.text, *addresses), port)
            except OSError as error:
                raise ResourceError(f"no engine can listen at {workers[n]}: {error}") from None
        if not await _answers(world, url):
            world.early = world.prompts.several(EARLY)
            for i, messages in enumerate(world.early):
                await world.engines[i % len(world.engines)].hold(world.held(messages))
        router = Router(url.rstrip("/"), NAME, world.http, world.engines, False, _listener(url))
        if await until(WAIT, lambda: _answers(world, url)) < 0:
            raise ResourceError(f"no router answers at {url} with a model after {WAIT:g} s")
        router.pid = _listener(url)
        await WallClock().sleep(1.0)
        world.given = router
        yield world


@asynccontextmanager
async def _world(folder: Path, seed: int) -> AsyncIterator[World]:
    model = write_toy(folder / NAME, max_position_embeddings=CONTEXT)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        world = World(model, TextModel.load(model), http, seed)
        try:
            yield world
        finally:
            await world.close()


async def _open(world: World, engine: ChaosEngine, port: int | None = None) -> None:
    await engine.start(port)
    world.engines.append(engine)
    world._opened.push_async_callback(engine.close)


async def _answers(world: World, url: str) -> bool:
    """Whether a router gives an answer of one of the engines."""
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        router = Router(url.rstrip("/"), NAME, world.http, world.engines, False, 0)
        async with asyncio.timeout(5.0):
            return (await router.ask(world.prompts.fresh(40))).ok
    return False


def _port(url: str, what: str) -> int:
    valid = f"http://127.0.0.1:PORT, PORT from 1 to {MOST_PORT - REPLAY}: the engines are started here"
    parts = _parts(url, what, valid)
    here, port = parts.hostname in ("127.0.0.1", "localhost"), parts.port or 0
    if not here or parts.scheme != "http" or not 1 <= port <= MOST_PORT - REPLAY:
        raise UserError(f"{what} has {url!r}; valid: {valid}", field=what.lstrip("-"))
    return port


def _parts(url: str, what: str, valid: str = "http://HOST:PORT") -> SplitResult:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        good = False
    if not good:
        raise UserError(f"{what} has {url!r}; valid: {valid}", field=what.lstrip("-"))
    return parts


def _listener(url: str) -> int:
    """The process that listens there, where it is on this machine and we may know; else 0."""
    parts = urlsplit(url)
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (parts.port,):
                return connection.pid or 0
    return 0
