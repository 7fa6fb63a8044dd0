"""Every planted fault is caught by the test that is meant for it; a slow and simple index passes."""

from __future__ import annotations

import pytest

from bien.core.clock import Clock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.prefix import groups_from, usable_from_counts
from bien.core.testing.suites import failures
from bien.core.worker.messages import WorkerInfo
from bien.gateway.index import KVIndex
from bien.gateway.testing import IndexSuite


class Simple:
    """Sets of (tier, group, hash) per worker, walked block by block. One rank."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.infos: dict[str, WorkerInfo] = {}
        self.held: dict[str, set[tuple[str, int, bytes]]] = {}
        self.place: dict[str, tuple[str, int, bool]] = {}  # generation, seq, in step
        self.coming: dict[str, list[tuple[bytes, float]]] = {}

    def join(self, info: WorkerInfo) -> None:
        self.infos[info.id] = info
        self.held[info.id] = set()
        self.place[info.id] = (info.generation, 0, True)
        self.coming[info.id] = []

    def leave(self, worker: str) -> None:
        for known in (self.infos, self.held, self.place, self.coming):
            known.pop(worker, None)

    def apply(self, batch: EventBatch) -> bool:
        if batch.worker not in self.place:
            return False
        generation, seq, in_step = self.place[batch.worker]
        if batch.generation != generation:
            self.forget(batch.worker)
            self.place[batch.worker] = (batch.generation, 0, False)
            return False
        if not in_step or batch.seq > seq + 1:
            self.place[batch.worker] = (generation, seq, False)
            return False
        if batch.seq <= seq:
            return True
        self.place[batch.worker] = (generation, batch.seq, True)
        self.feed(batch.worker, batch.events)
        return True

    def forget(self, worker: str) -> None:
        self.held[worker] = set()
        self.coming[worker] = []

    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        if worker in self.place:
            self.place[worker] = (generation, seq, True)
            self.held[worker] = set()
            self.feed(worker, events)

    def feed(self, worker: str, events: list[KVEvent]) -> None:
        held = self.held[worker]
        for event in events:
            keys = {(event.tier, event.group, h) for h in split(event.hashes)}
            if event.op == "stored":
                held |= keys
            elif event.op == "removed":
                self.remove(held, keys)
            else:
                held -= {key for key in held if key[0] == event.tier}
        self.coming[worker] = [c for c in self.coming[worker] if not self.confirmed(worker, c[0][-16:])]

    def remove(self, held: set[tuple[str, int, bytes]], keys: set[tuple[str, int, bytes]]) -> None:
        held -= keys

    def confirmed(self, worker: str, block: bytes) -> bool:
        return any(key[2] == block for key in self.held[worker])

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        if worker in self.coming:
            if ttl:
                self.coming[worker].append((hashes, self.clock.time() + ttl))
            else:
                self.take_back(self.coming[worker], hashes)

    def take_back(self, coming: list[tuple[bytes, float]], hashes: bytes) -> None:
        at = next((i for i, c in enumerate(coming) if c[0] == hashes), None)
        if at is not None:
            del coming[at]

    def live(self, worker: str) -> list[bytes]:
        return [hashes for hashes, end in self.coming[worker] if end > self.clock.time()]

    def overlaps(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        return [self.overlap(split(hashes), worker) for worker, _ in targets]

    def overlap(self, chain: list[bytes], worker: str) -> int:
        if worker not in self.infos:
            return 0
        info, held = self.infos[worker], self.held[worker]
        groups = groups_from(info.group_kinds, info.group_windows, info.block_tokens)
        have = [
            [i for i, h in enumerate(chain) if any(key[1:] == (g, h) for key in held)]
            for g in range(len(groups))
        ]
        best = usable_from_counts(groups, have, len(chain))
        for coming in self.live(worker):
            shared = 0
            for one, two in zip(split(coming), chain, strict=False):
                if one != two:
                    break
                shared += 1
            best = max(best, shared)
        return best

    def close(self) -> None: ...


class LiesAfterRemoval(Simple):
    def remove(self, held: set[tuple[str, int, bytes]], keys: set[tuple[str, int, bytes]]) -> None:
        held -= set(list(keys)[1:])


class StopsAtAnUnknownBlock(Simple):
    def remove(self, held: set[tuple[str, int, bytes]], keys: set[tuple[str, int, bytes]]) -> None:
        if keys <= held:
            held -= keys


class ForgetsTheTier(Simple):
    def remove(self, held: set[tuple[str, int, bytes]], keys: set[tuple[str, int, bytes]]) -> None:
        held -= {key for key in held if key[1:] in {k[1:] for k in keys}}


class KeepsAnotherLife(Simple):
    def forget(self, worker: str) -> None: ...


class IgnoresGenerations(Simple):
    def apply(self, batch: EventBatch) -> bool:
        batch.generation = self.place[batch.worker][0] if batch.worker in self.place else ""
        return super().apply(batch)


class IgnoresGaps(Simple):
    def apply(self, batch: EventBatch) -> bool:
        generation, _, in_step = self.place[batch.worker]
        self.place[batch.worker] = (generation, batch.seq - 1, in_step)
        return super().apply(batch)


class AppliesTwice(Simple):
    def apply(self, batch: EventBatch) -> bool:
        if batch.seq <= self.place[batch.worker][1] and batch.generation == self.place[batch.worker][0]:
            self.feed(batch.worker, batch.events)
        return super().apply(batch)


class PredictsForEver(Simple):
    def live(self, worker: str) -> list[bytes]:
        return [hashes for hashes, _ in self.coming[worker]]


class KeepsAborted(Simple):
    def take_back(self, coming: list[tuple[bytes, float]], hashes: bytes) -> None: ...


class TakesAllBack(Simple):
    def take_back(self, coming: list[tuple[bytes, float]], hashes: bytes) -> None:
        coming[:] = [c for c in coming if c[0] != hashes]


class IgnoresConfirmation(Simple):
    def confirmed(self, worker: str, block: bytes) -> bool:
        return False


class AddsToSnapshots(Simple):
    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        before = set(self.held.get(worker, ()))
        super().reset(worker, dp_rank, generation, seq, events)
        if worker in self.held:
            self.held[worker] |= before


class OneGroupOnly(Simple):
    def feed(self, worker: str, events: list[KVEvent]) -> None:
        for event in events:
            event.group = 0
        super().feed(worker, events)


class MixesWorkers(Simple):
    def overlap(self, chain: list[bytes], worker: str) -> int:
        return max((super(MixesWorkers, self).overlap(chain, w) for w in self.infos), default=0)


def suite_of(index: type[Simple]) -> type[IndexSuite]:
    class Suite(IndexSuite):
        def build(self, clock: Clock) -> KVIndex:
            return index(clock)

    return Suite


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 16] for i in range(0, len(hashes), 16)]


def test_a_sound_index_passes() -> None:
    assert failures(suite_of(Simple)) == []


@pytest.mark.parametrize(
    ("index", "caught_by"),
    [
        (LiesAfterRemoval, "test_what_was_removed_is_gone"),
        (StopsAtAnUnknownBlock, "test_what_was_removed_is_gone"),
        (ForgetsTheTier, "test_a_block_lives_while_a_tier_holds_it"),
        (KeepsAnotherLife, "test_another_generation_starts_empty"),
        (IgnoresGenerations, "test_another_generation_starts_empty"),
        (IgnoresGaps, "test_a_gap_is_noticed_and_healed"),
        (AppliesTwice, "test_a_gap_is_noticed_and_healed"),
        (AddsToSnapshots, "test_a_snapshot_replaces_everything"),
        (PredictsForEver, "test_predictions_count_until_they_expire"),
        (KeepsAborted, "test_a_prediction_can_be_taken_back"),
        (TakesAllBack, "test_a_prediction_can_be_taken_back"),
        (IgnoresConfirmation, "test_a_prediction_ends_with_the_event_that_confirms_it"),
        (OneGroupOnly, "test_agrees_with_the_pools_over_all_groups"),
        (MixesWorkers, "test_each_worker_has_its_own"),
    ],
)
def test_a_planted_fault_is_caught(index: type[Simple], caught_by: str) -> None:
    assert caught_by in [line.split(":")[0] for line in failures(suite_of(index))]
