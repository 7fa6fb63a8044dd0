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

Rank = tuple[str, int]
Keys = set[tuple[str, int, bytes]]


class Simple:
    """Sets of (tier, group, hash) per worker and rank, walked block by block."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.infos: dict[Rank, WorkerInfo] = {}
        self.held: dict[Rank, Keys] = {}
        self.place: dict[Rank, tuple[str, int, bool]] = {}  # generation, seq, in step
        self.coming: dict[Rank, list[tuple[bytes, float]]] = {}

    def join(self, info: WorkerInfo) -> None:
        self.leave(info.id)
        for rank in range(info.dp_ranks):
            at = info.id, rank
            self.infos[at] = info
            self.held[at] = set()
            self.place[at] = (info.generation, 0, True)
            self.coming[at] = []

    def leave(self, worker: str) -> None:
        for at in [at for at in self.infos if at[0] == worker]:
            self.drop(at)

    def drop(self, at: Rank) -> None:
        for known in (self.infos, self.held, self.place, self.coming):
            known.pop(at, None)

    def apply(self, batch: EventBatch) -> bool:
        at = self.at(batch.worker, batch.dp_rank)
        if at not in self.place:
            return False
        generation, seq, in_step = self.place[at]
        if batch.generation != generation:
            self.forget(at)
            self.place[at] = (batch.generation, 0, False)
            return False
        if not in_step or batch.seq > seq + 1:
            self.place[at] = (generation, seq, False)
            return False
        if batch.seq <= seq:
            return True
        self.place[at] = (generation, batch.seq, True)
        self.feed(at, batch.events)
        return True

    def at(self, worker: str, dp_rank: int) -> Rank:
        return worker, dp_rank

    def forget(self, at: Rank) -> None:
        self.held[at] = set()
        self.coming[at] = []

    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        at = self.at(worker, dp_rank)
        if at in self.place:
            self.place[at] = (generation, seq, True)
            self.held[at] = set()
            self.feed(at, events)

    def feed(self, at: Rank, events: list[KVEvent]) -> None:
        held = self.held[at]
        for event in events:
            keys = {(event.tier, event.group, h) for h in split(event.hashes)}
            if event.op == "stored":
                held |= keys
            elif event.op == "removed":
                self.remove(held, keys)
            else:
                held -= {key for key in held if self.clears(event.tier, key[0])}
        self.coming[at] = [c for c in self.coming[at] if not self.confirmed(at, c[0][-16:])]

    def remove(self, held: Keys, keys: Keys) -> None:
        held -= keys

    def clears(self, cleared: str, tier: str) -> bool:
        return cleared == tier

    def confirmed(self, at: Rank, block: bytes) -> bool:
        return any(key[::2] == (self.first(at), block) for key in self.held[at])

    def first(self, at: Rank) -> str:
        return self.infos[at].tiers[0]

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        at = self.at(worker, dp_rank)
        if at in self.coming:
            if ttl:
                self.coming[at].append((hashes, self.clock.time() + ttl))
            else:
                self.take_back(self.coming[at], hashes)

    def take_back(self, coming: list[tuple[bytes, float]], hashes: bytes) -> None:
        at = next((i for i, c in enumerate(coming) if c[0] == hashes), None)
        if at is not None:
            del coming[at]

    def live(self, at: Rank) -> list[bytes]:
        return [hashes for hashes, end in self.coming[at] if end > self.clock.time()]

    def overlaps(self, hashes: bytes, targets: list[Rank]) -> list[int]:
        return [self.overlap(split(hashes), self.at(*target)) for target in targets]

    def overlap(self, chain: list[bytes], at: Rank) -> int:
        """All tiers count."""
        if at not in self.infos:
            return 0
        return self.coming_there(chain, at, self.usable(chain, at, {key[1:] for key in self.held[at]}))

    def usable(self, chain: list[bytes], at: Rank, held: set[tuple[int, bytes]]) -> int:
        info = self.infos[at]
        groups = groups_from(info.group_kinds, info.group_windows, info.block_tokens)
        have = [[i for i, h in enumerate(chain) if (g, h) in held] for g in range(len(groups))]
        return usable_from_counts(groups, have, len(chain))

    def coming_there(self, chain: list[bytes], at: Rank, best: int) -> int:
        for coming in self.live(at):
            shared = 0
            for one, two in zip(split(coming), chain, strict=False):
                if one != two:
                    break
                shared += 1
            best = max(best, shared)
        return best

    def close(self) -> None: ...


class Tiered(Simple):
    def overlap(self, chain: list[bytes], at: Rank) -> int:
        if at not in self.infos:
            return 0
        first = {key[1:] for key in self.held[at] if key[0] == self.first(at)}
        return self.coming_there(chain, at, self.usable(chain, at, first))

    def loadable(self, hashes: bytes, targets: list[Rank]) -> list[int]:
        return [self.further(split(hashes), self.at(*target)) for target in targets]

    def further(self, chain: list[bytes], at: Rank) -> int:
        return super().overlap(chain, at) - self.overlap(chain, at)


class LiesAfterRemoval(Simple):
    def remove(self, held: Keys, keys: Keys) -> None:
        held -= set(list(keys)[1:])


class StopsAtAnUnknownBlock(Simple):
    def remove(self, held: Keys, keys: Keys) -> None:
        if keys <= held:
            held -= keys


class ForgetsTheTier(Simple):
    def remove(self, held: Keys, keys: Keys) -> None:
        held -= {key for key in held if key[1:] in {k[1:] for k in keys}}


class KeepsAnotherLife(Simple):
    def forget(self, at: Rank) -> None: ...


class IgnoresGenerations(Simple):
    def apply(self, batch: EventBatch) -> bool:
        at = batch.worker, batch.dp_rank
        batch.generation = self.place[at][0] if at in self.place else ""
        return super().apply(batch)


class IgnoresGaps(Simple):
    def apply(self, batch: EventBatch) -> bool:
        at = batch.worker, batch.dp_rank
        generation, _, in_step = self.place[at]
        self.place[at] = (generation, batch.seq - 1, in_step)
        return super().apply(batch)


class AppliesTwice(Simple):
    def apply(self, batch: EventBatch) -> bool:
        at = batch.worker, batch.dp_rank
        if batch.seq <= self.place[at][1] and batch.generation == self.place[at][0]:
            self.feed(at, batch.events)
        return super().apply(batch)


class PredictsForEver(Simple):
    def live(self, at: Rank) -> list[bytes]:
        return [hashes for hashes, _ in self.coming[at]]


class KeepsAborted(Simple):
    def take_back(self, coming: list[tuple[bytes, float]], hashes: bytes) -> None: ...


class TakesAllBack(Simple):
    def take_back(self, coming: list[tuple[bytes, float]], hashes: bytes) -> None:
        coming[:] = [c for c in coming if c[0] != hashes]


class IgnoresConfirmation(Simple):
    def confirmed(self, at: Rank, block: bytes) -> bool:
        return False


class AddsToSnapshots(Simple):
    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        before = set(self.held.get((worker, dp_rank), ()))
        super().reset(worker, dp_rank, generation, seq, events)
        if (worker, dp_rank) in self.held:
            self.held[worker, dp_rank] |= before


class OneGroupOnly(Simple):
    def feed(self, at: Rank, events: list[KVEvent]) -> None:
        for event in events:
            event.group = 0
        super().feed(at, events)


class MixesWorkers(Simple):
    def overlap(self, chain: list[bytes], at: Rank) -> int:
        return max((super(MixesWorkers, self).overlap(chain, other) for other in self.infos), default=0)


class ClearsEveryTier(Tiered):
    def clears(self, cleared: str, tier: str) -> bool:
        return True


class CountsSlowTiers(Tiered):
    """What must be loaded counts as if it were on the device."""

    def overlap(self, chain: list[bytes], at: Rank) -> int:
        return Simple.overlap(self, chain, at)


class KnowsOneTier(Tiered):
    def further(self, chain: list[bytes], at: Rank) -> int:
        return 0


class CountsFromTheStart(Tiered):
    def further(self, chain: list[bytes], at: Rank) -> int:
        return Simple.overlap(self, chain, at)


class TakesOneTierAtATime(Tiered):
    """A prefix of which one tier has the beginning and another the end is no good to it."""

    def further(self, chain: list[bytes], at: Rank) -> int:
        near = self.overlap(chain, at)
        tiers = {key[0] for key in self.held.get(at, ())}
        each = [{key[1:] for key in self.held[at] if key[0] == tier} for tier in tiers]
        return max((self.usable(chain, at, held) for held in each), default=near) - near


class CallsTheFirstTierDevice(Tiered):
    def first(self, at: Rank) -> str:
        return "device"


class LoadsWhatIsPredicted(Tiered):
    def further(self, chain: list[bytes], at: Rank) -> int:
        if at not in self.infos:
            return 0
        held = self.held[at]
        first = {key[1:] for key in held if key[0] == self.first(at)}
        return self.usable(chain, at, {key[1:] for key in held}) - self.usable(chain, at, first)


class KnowsOneRank(Tiered):
    def join(self, info: WorkerInfo) -> None:
        super().join(info)
        for rank in range(1, info.dp_ranks):
            self.drop((info.id, rank))


class MixesRanks(Tiered):
    def at(self, worker: str, dp_rank: int) -> Rank:
        return worker, 0


class PredictsForTheFirstRank(Tiered):
    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        super().predict(worker, 0, hashes, ttl)


class LosesRanksTogether(Tiered):
    def apply(self, batch: EventBatch) -> bool:
        taken = super().apply(batch)
        if not taken:
            for at, (generation, seq, _) in self.place.items():
                self.place[at] = (generation, seq, False)
        return taken


class ResetsEveryRank(Tiered):
    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        for at in self.held:
            self.held[at] = set()
        super().reset(worker, dp_rank, generation, seq, events)


class KeepsRanksOfTheDead(Tiered):
    def leave(self, worker: str) -> None:
        self.drop((worker, 0))


def suite_of(index: type[Simple]) -> type[IndexSuite]:
    class Suite(IndexSuite):
        def build(self, clock: Clock) -> KVIndex:
            return index(clock)

    return Suite


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 16] for i in range(0, len(hashes), 16)]


@pytest.mark.parametrize("index", [Simple, Tiered])
def test_a_sound_index_passes(index: type[Simple]) -> None:
    assert failures(suite_of(index)) == []


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
        (ClearsEveryTier, "test_a_block_lives_while_a_tier_holds_it"),
        (ClearsEveryTier, "test_agrees_with_the_pools_over_all_groups"),
        (CountsSlowTiers, "test_slower_tiers_are_told_apart"),
        (CountsSlowTiers, "test_agrees_with_the_pools_over_all_groups"),
        (KnowsOneTier, "test_slower_tiers_are_told_apart"),
        (CountsFromTheStart, "test_slower_tiers_are_told_apart"),
        (TakesOneTierAtATime, "test_slower_tiers_are_told_apart"),
        (TakesOneTierAtATime, "test_agrees_with_the_pools_over_all_groups"),
        (CallsTheFirstTierDevice, "test_slower_tiers_are_told_apart"),
        (LoadsWhatIsPredicted, "test_what_is_predicted_need_not_be_loaded"),
        (KnowsOneRank, "test_each_rank_has_its_own"),
        (MixesRanks, "test_each_rank_has_its_own"),
        (MixesRanks, "test_agrees_with_the_pools_over_all_groups"),
        (PredictsForTheFirstRank, "test_each_rank_has_its_own"),
        (LosesRanksTogether, "test_each_rank_has_its_own"),
        (ResetsEveryRank, "test_each_rank_has_its_own"),
        (KeepsRanksOfTheDead, "test_each_rank_has_its_own"),
    ],
)
def test_a_planted_fault_is_caught(index: type[Simple], caught_by: str) -> None:
    assert caught_by in [line.split(":")[0] for line in failures(suite_of(index))]
