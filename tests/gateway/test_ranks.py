"""Workers of several engines: each is a place of its own, for loads, caches and requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from bien.core.clock import WallClock
from bien.core.deployment import GatewaySpec
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import extend_chain, tenant_key
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.messages import Snapshot, StepFrame, WorkerStats
from bien.gateway.core import Gateway
from bien.gateway.testing.durable import PublishingWorker, until
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.indexes.redis import RedisConfig
from bien.plugins.indexes.redis.index import RedisIndex
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter
from tests.redis_process import redis_process


class Engines(FakeWorker):
    """A worker whose engines do only what its test says."""

    def __init__(self, id: str = "w", ranks: int = 2, fp: str = "fake") -> None:
        super().__init__(WallClock(), info=fake_info(id, dp_ranks=ranks, fp=fp), auto=False)
        self.asked: list[int] = []
        self.seqs = [0] * ranks
        self.held: list[list[KVEvent]] = [[] for _ in range(ranks)]

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        self.asked.append(dp_rank)
        return Snapshot(self.info.generation, self.seqs[dp_rank], list(self.held[dp_rank]), dp_rank)

    def store(self, rank: int, hashes: bytes) -> None:
        self.seqs[rank] += 1
        event = KVEvent("stored", hashes=hashes)
        self.held[rank].append(event)
        batch = EventBatch(self.info.id, rank, self.info.generation, self.seqs[rank], [event])
        assert self._listener is not None
        self._listener.on_frame(self, StepFrame(batch=batch, dp_rank=rank))

    def busy(self, rank: int, **stats: int) -> None:
        assert self._listener is not None
        self._listener.on_frame(self, StepFrame(stats=WorkerStats(**stats), dp_rank=rank))


def request(n: int) -> GenerateRequest:
    prompt = TokenIds.of(random.Random(n).randrange(1000) for _ in range(200))
    return GenerateRequest(f"r{n}", prompt, SamplingParams(max_tokens=4), session=f"s{n}")


def chain(n: int) -> bytes:
    return extend_chain(tenant_key(""), b"", request(n).prompt, 4, 196)


@pytest.fixture
async def made() -> AsyncIterator[tuple[Gateway, Engines]]:
    worker = Engines()
    router = KVAwareRouter(KVAwareConfig(), random.Random(0))
    gateway = Gateway([worker], router, MemoryIndex(WallClock()), WallClock(), GatewaySpec())
    await gateway.warm(5.0)
    yield gateway, worker
    await gateway.close()


async def test_a_request_goes_to_the_rank_that_holds_its_prefix(made: tuple[Gateway, Engines]) -> None:
    gateway, worker = made
    assert sorted(worker.asked) == [0, 1], "each has a start of its own"
    for n in range(8):
        worker.store(n % 2, chain(n))
    for n in range(8):
        async with gateway.generate(request(n)) as stream:
            assert stream.dp_rank == n % 2 == worker.submitted[-1][1].dp_rank
            assert stream.decision.predicted_cached == 196


async def test_loads_are_those_of_ranks(made: tuple[Gateway, Engines]) -> None:
    gateway, worker = made
    worker.busy(0, running=3, queued_tokens=100_000)
    for n in range(3):
        async with gateway.generate(request(n)) as stream:
            assert stream.dp_rank == 1
    worker.busy(1, running=2, queued_tokens=900_000)
    async with gateway.generate(request(9)) as stream:
        assert stream.dp_rank == 0
    assert gateway.loads[0].stats.running == 5, "a worker's load is that of all"
    worker.busy(0)
    worker.busy(1)
    streams = [gateway.generate(request(100 + n)) for n in range(4)]
    entered = [await stream.__aenter__() for stream in streams]
    assert sorted(stream.dp_rank for stream in entered) == [0, 0, 1, 1], "what was placed counts at its rank"
    for one in streams:
        await one.__aexit__(None, None, None)
    member = gateway._members["w"]
    assert [(rank.inflight, rank.unreported) for rank in member.ranks] == [(0, 0), (0, 0)]


async def test_a_gap_of_one_rank_is_healed_by_its_own_snapshot(made: tuple[Gateway, Engines]) -> None:
    gateway, worker = made
    worker.store(0, chain(1))
    worker.seqs[1] += 1
    worker.held[1].append(KVEvent("stored", hashes=chain(2)))  # it was lost on the way
    worker.store(1, chain(3))
    await gateway.warm(5.0)
    assert worker.asked.count(0) == 1 and worker.asked.count(1) == 2
    for n, rank in ((1, 0), (2, 1), (3, 1)):
        async with gateway.generate(request(n)) as stream:
            assert (stream.dp_rank, stream.decision.predicted_cached) == (rank, 196)


async def test_a_new_gateway_finds_every_rank_in_redis() -> None:
    with redis_process() as server:
        config = RedisConfig(server.url, lease_seconds=0.6, flush_seconds=0.001)
        index = RedisIndex(config, Context(clock=WallClock()))
        await index.start()
        worker = Engines(fp="fp")
        told = PublishingWorker(index.publication, worker.info)
        for n in range(6):
            told.tell(KVEvent("stored", hashes=chain(n)), dp_rank=n % 2)
        await until(lambda: [rank.seq for rank in told.publisher.ranks] == [3, 3])
        await until(lambda: all(rank.snapshot_at for rank in told.publisher.ranks))
        gateway = Gateway(
            [worker], KVAwareRouter(KVAwareConfig(), random.Random(0)), index, WallClock(), GatewaySpec()
        )
        async with asyncio.timeout(20):
            await gateway.warm(20.0)
        assert worker.asked == [] and index.restores == 2
        for n in range(6):
            async with gateway.generate(request(n)) as stream:
                assert (stream.dp_rank, stream.decision.predicted_cached) == (n % 2, 196)
        await told.close()
        await gateway.close()
