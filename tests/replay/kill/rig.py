"""A whole deployment in one process, but for its workers, which are real processes that die by order.

`folder` is a test's own: what else tests share lies beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import aiohttp
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from bien.core.clock import WallClock
from bien.core.deployment import GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.kv.hashing import HASH_BYTES
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.launch import WorkerProcess, launch
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.start import WorkerStart
from bien.gateway.core import Gateway
from bien.gateway.http.app import make_app
from bien.gateway.http.server import serve
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter
from bien.replay.processes import Processes
from tests.core.worker.client_contract import Recorder
from tests.replay.kill.asking import TEXT, Answer, Question, ask
from tests.replay.kill.points import FOLDER

ROOT = Path(__file__).parents[3]
PREDICT_TTL = 0.2  # seconds; what the index has not been told by then, it must not claim
PATIENCE = 60.0  # seconds after which something hangs


class Hurried(WallClock):
    """For who starts workers again: so fast that no worker counts as short-lived."""

    def time(self) -> float:
        return super().time() * 1000

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 20)


class Rig:
    def __init__(self, workers: list[WorkerProcess], folder: Path) -> None:
        self.folder = folder  # where orders to die lie
        self.died: list[tuple[str, str]] = []  # worker and reason, as told to who starts them again
        self.asked = 0  # requests that were sent
        self.http: aiohttp.ClientSession
        self.gateway: Gateway
        self.index: MemoryIndex
        self.workers = workers  # Processes puts the newest process of each worker here
        self.processes = Processes(workers, clock=Hurried())

    def on_step(self, who: str, what: str, *_: int) -> None:
        if what.startswith("died"):
            self.died.append((who, what))
        assert "given up" not in what, what

    async def ask(self, question: Question, answer: Answer | None = None) -> Answer:
        self.asked += 1
        return await ask(self.http, question, answer or Answer())

    async def until(self, what: str, holds: Callable[[], bool | Awaitable[bool]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    held = holds()
                    if held if isinstance(held, bool) else await held:
                        return
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"{what}: not after {PATIENCE:g} s") from None

    @property
    def summary(self) -> str:
        totals = self.gateway.totals
        counts = f"{len(self.died)} deaths, {self.asked} requests, {totals.replaced} placed again"
        return f"{counts}; how they ended: {totals.finished}"

    @property
    def placed(self) -> set[str]:
        """Sessions of the requests that a worker has."""
        return {s.route.session for m in self.gateway._members.values() for s in m.streams.values()}

    async def counter(self, name: str) -> float:
        async with self.http.get("/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        return sum(s.value for f in families for s in f.samples if s.name == f"{name}_total")

    @asynccontextmanager
    async def direct(self, worker: WorkerProcess) -> AsyncIterator[tuple[SocketClient, Recorder]]:
        """Another gateway of a worker, as bare as can be."""
        client = await SocketClient.connect(worker.ready.host, worker.ready.port, worker.start.token)
        recorder = Recorder()
        client.attach(recorder)
        try:
            yield client, recorder
        finally:
            await client.close()

    def named(self, ids: list[int], tokens: int) -> GenerateRequest:
        """A request as the gateway sends it, so that workers cache it as its requests."""
        greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=0)
        request = GenerateRequest("direct", TokenIds.of(ids), greedy)
        assert self.gateway._chains is not None
        self.gateway._chains.name(request)
        return request

    async def whole(self, died: int) -> None:
        """`died` deaths were seen, all workers are back, and nothing is left over of what was lost."""
        await self.until(f"{died} deaths are known", lambda: len(self.died) >= died)
        await self.until("all are back", self._complete)
        assert len(self.died) == died, self.died
        for _, reason in self.died:
            assert "signal 9 (SIGKILL)" in reason or "cannot be started again" in reason, reason
        await self.until("slots are free", lambda: self.gateway.inflight == 0)
        for member in self.gateway._members.values():
            assert (member.streams, sum(rank.unreported for rank in member.ranks)) == ({}, 0)
        totals = self.gateway.totals
        assert sum(totals.finished.values()) == self.asked, totals
        assert sum(totals.placements.values()) == self.asked + totals.replaced, totals
        assert await self.counter("bien_replaced") == totals.replaced
        assert await self.counter("bien_worker_deaths") == totals.deaths
        assert totals.faults == 0

    def _complete(self) -> bool:
        live = {info.generation for info in self.gateway.infos}
        return all(w.alive for w in self.workers) and live == {w.ready.info.generation for w in self.workers}

    async def check_index(self, questions: list[Question], exact: bool = True) -> None:
        """Each worker answers, with its integrity checked (BIEN_CHECK), and holds what the index says.
        Not `exact`: it may hold more, in tiers that snapshots do not tell of."""
        chains = [self.named(q.ids, 1).hashes for q in questions]
        for worker in self.workers:
            async with self.direct(worker) as (client, recorder):
                client.submit(1, self.named([5, 6, 7], 2))
                await recorder.finished(1)
                assert recorder.finish(1) == "length"
                place = [(worker.ready.info.id, 0)]

                async def equal(client: SocketClient = client, place: list[tuple[str, int]] = place) -> bool:
                    snapshot = await client.snapshot()
                    pool = {h for event in snapshot.events for h in split(event.hashes)}
                    held = [usable(split(chain), pool) for chain in chains]
                    said = [self.index.overlaps(chain, place)[0] for chain in chains]
                    return held == said or (
                        not exact and all(a <= b for a, b in zip(held, said, strict=True))
                    )

                await self.until(f"the index equals the pool of {place}", equal)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


def usable(chain: list[bytes], pool: set[bytes]) -> int:
    return next((i for i, block in enumerate(chain) if block not in pool), len(chain))


@asynccontextmanager
async def rig(
    folder: Path, count: int, *, kv_tokens: int = 48_000, slots: int = 3, store: bool = False
) -> AsyncIterator[Rig]:
    folder.mkdir()
    pool = PoolSpec(kv_tokens=kv_tokens, slots=slots, kv_store=Selection("host") if store else None)
    starts = [
        WorkerStart(
            f"w{i}", ModelSpec("hash"), pool, token="secret", builder="tests.replay.kill.worker:build"
        )
        for i in range(count)
    ]
    env = {
        "PYTHONPATH": str(ROOT),
        FOLDER: str(folder),
        "BIEN_CHECK": "1",
        # Two hundred starts: each need not compile all modules again.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder.parent.parent / "pycache"),
    }
    made = Rig(await launch(starts, env=env), folder)
    try:
        clock, registry = WallClock(), CollectorRegistry()
        made.index = MemoryIndex(clock)
        made.gateway = Gateway(
            await made.processes.connect(),
            KVAwareRouter(KVAwareConfig(), Random(1)),
            made.index,
            clock,
            GatewaySpec(secret="s"),
            metrics=registry,
            rng=Random(2),
            predict_ttl=PREDICT_TTL,
        )
        context = made.gateway.max_context
        app = make_app(made.gateway, TEXT, "toy", max_context=context, vocab_size=267, registry=registry)
        server = await serve(app, "127.0.0.1", 0)
        made.processes.watch(made.gateway, made.on_step)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(server.url, connector=connector) as made.http:
            yield made
        await server.close()
        await made.gateway.close()
    finally:
        await made.processes.stop()
