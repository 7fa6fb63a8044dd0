"""The suite of indexes with a store fails broken ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bien.core.clock import Clock
from bien.core.kv.events import EventBatch
from bien.core.providers import Context
from bien.core.testing.suites import failures
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.published import Lease
from bien.gateway.index import DurableIndex
from bien.gateway.testing import durable
from bien.gateway.testing.durable import DurableSuite
from bien.plugins.indexes.redis import RedisConfig
from bien.plugins.indexes.redis.index import RedisIndex
from bien.plugins.indexes.redis.starts import Start
from tests.redis_process import RedisProcess, redis_process


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


class RestoresNothing(RedisIndex):
    async def restore(self, worker: str, dp_rank: int) -> bool:
        return worker in self._watched


class NeverRestores(RedisIndex):
    async def restore(self, worker: str, dp_rank: int) -> bool:
        return False


class SnapshotOnly(RedisIndex):
    """Forgets what came after it."""

    async def restore(self, worker: str, dp_rank: int) -> bool:
        keep, self._mirror.apply = self._mirror.apply, lambda batch: True  # type: ignore[method-assign]
        try:
            return await super().restore(worker, dp_rank)
        finally:
            self._mirror.apply = keep  # type: ignore[method-assign]


class LeavesOutGaps(RedisIndex):
    """What is missing in the stream is taken for nothing."""

    async def restore(self, worker: str, dp_rank: int) -> bool:
        before = self._starts.read

        async def read(info: WorkerInfo, rank: int) -> Start | None:
            start = await before(info, rank)
            position = self._mirror.position(worker, rank)
            if start is None and position is not None and info.generation == "1":
                return Start(durable.Snapshot(info.generation, position.seq, []))
            return start

        self._starts.read = read  # type: ignore[method-assign]
        try:
            return await super().restore(worker, dp_rank)
        finally:
            self._starts.read = before  # type: ignore[method-assign]


class MixesLives(RedisIndex):
    def join(self, info: WorkerInfo) -> None:
        if info.id not in self._watched:
            super().join(info)


class SeesDeadWorkers(RedisIndex):
    seen: dict[str, Lease] = {}

    async def leases(self) -> list[Lease]:
        for lease in await super().leases():
            self.seen[lease.info.id] = lease
        return list(self.seen.values())


class Blind(RedisIndex):
    async def leases(self) -> list[Lease]:
        return []


class TakesFramesTwice(RedisIndex):
    """After a start it knows, it asks for a snapshot again."""

    def apply(self, batch: EventBatch) -> bool:
        return super().apply(batch) and not self.restores


def suite_of(index: type[RedisIndex], server: RedisProcess) -> type[DurableSuite]:
    class Suite(DurableSuite):
        rounds = 5

        def setup_method(self) -> None:
            with server.client as client:
                client.flushall()

        def build(self, clock: Clock) -> DurableIndex:
            config = RedisConfig(server.url, lease_seconds=0.6, poll_seconds=0.01, flush_seconds=0.001)
            return index(config, Context(clock=clock))

    return Suite


def test_a_sound_index_passes(shared: RedisProcess) -> None:
    assert failures(suite_of(RedisIndex, shared)) == []


@pytest.mark.parametrize(
    ("index", "caught_by"),
    [
        (RestoresNothing, "test_a_new_index_starts_from_what_is_stored"),
        (NeverRestores, "test_a_new_index_starts_from_what_is_stored"),
        (SnapshotOnly, "test_a_new_index_starts_from_what_is_stored"),
        (TakesFramesTwice, "test_a_new_index_starts_from_what_is_stored"),
        (LeavesOutGaps, "test_what_is_not_whole_is_not_taken"),
        (MixesLives, "test_another_life_starts_empty"),
        (SeesDeadWorkers, "test_leases_end_with_their_workers"),
        (Blind, "test_leases_end_with_their_workers"),
    ],
)
def test_a_planted_fault_is_caught(
    index: type[RedisIndex], caught_by: str, shared: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "PATIENCE", 0.8 if index is not SeesDeadWorkers else 1.5)
    suite = suite_of(index, shared)
    others = {name: None for name in dir(suite) if name.startswith("test_") and name != caught_by}
    only = type("Only", (suite,), {})
    for name in others:
        setattr(only, name, lambda self: None)
    assert caught_by in [line.split(":")[0] for line in failures(only)]
