"""Conformance suite of KV indexes. Subclass it in your tests and give `build`:

class TestMine(IndexSuite):
    def build(self, clock):
        return MyIndex(MyConfig(), clock)
"""

from __future__ import annotations

import random

import numpy as np

from bien.core.clock import Clock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.prefix import groups_from, usable_blocks
from bien.core.worker.messages import WorkerInfo
from bien.gateway.index import KVIndex, TieredIndex

BLOCK = 4


class HandClock:
    """Time that passes only when a test says so."""

    virtual = True

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_chain(name: str, blocks: int) -> list[bytes]:
    rng = random.Random(name)
    return [rng.randbytes(16) for _ in range(blocks)]


def make_info(
    worker: str = "w",
    kinds: tuple[str, ...] = ("full",),
    windows: tuple[int, ...] = (0,),
    generation: str = "1",
    dp_ranks: int = 1,
    tiers: tuple[str, ...] = ("device", "host"),
) -> WorkerInfo:
    return WorkerInfo(
        worker,
        generation,
        "fp",
        block_tokens=BLOCK,
        group_kinds=kinds,
        group_windows=windows,
        snapshot_tokens=(0,) * len(kinds),
        dp_ranks=dp_ranks,
        tiers=tiers,
    )


class Teller:
    """Numbers the batches of one worker's rank, as the worker does: from 1, by one."""

    def __init__(self, index: KVIndex, worker: str = "w", generation: str = "1", dp_rank: int = 0) -> None:
        self.index = index
        self.worker = worker
        self.generation = generation
        self.dp_rank = dp_rank
        self.seq = 0

    def stored(self, blocks: list[bytes], parent: bytes = b"", group: int = 0, tier: str = "device") -> bool:
        return self.tell(KVEvent("stored", group, parent, b"".join(blocks), tier))

    def removed(self, blocks: list[bytes], group: int = 0, tier: str = "device") -> bool:
        return self.tell(KVEvent("removed", group, b"", b"".join(blocks), tier))

    def tell(self, *events: KVEvent) -> bool:
        self.seq += 1
        return self.index.apply(
            EventBatch(self.worker, self.dp_rank, self.generation, self.seq, list(events))
        )


class IndexSuite:
    """What every index must say, however it keeps it."""

    rounds = 60
    """Random histories."""

    def build(self, clock: Clock) -> KVIndex:
        """A fresh index on `clock`."""
        raise NotImplementedError("a suite needs `def build(self, clock): return <your index>`")

    def setup_method(self) -> None:
        self.clock = HandClock()
        self.index = self.build(self.clock)
        self.blocks = make_chain("x", 9)

    def teardown_method(self) -> None:
        if hasattr(self, "index"):
            self.index.close()

    def usable(self, blocks: list[bytes], *workers: str) -> list[int]:
        return self.index.overlaps(b"".join(blocks), [(worker, 0) for worker in workers or ("w",)])

    def reach(self, blocks: list[bytes], worker: str = "w", dp_rank: int = 0) -> tuple[int, int]:
        """Usable blocks: of the first tier, and of all. Only a `TieredIndex` tells them apart."""
        chain, targets = b"".join(blocks), [(worker, dp_rank)]
        near = self.index.overlaps(chain, targets)[0]
        if not isinstance(self.index, TieredIndex):
            return near, near
        return near, near + self.index.loadable(chain, targets)[0]

    def test_each_worker_has_its_own(self) -> None:
        for worker in "abc":
            self.index.join(make_info(worker))
        Teller(self.index, "a").stored(self.blocks[:6])
        Teller(self.index, "b").stored(self.blocks)
        assert self.usable(self.blocks, "c", "b", "a") == [0, 9, 6]
        assert self.usable(self.blocks[:3], "c", "b", "a") == [0, 3, 3]
        assert self.usable([], "a") == [0]
        assert self.usable(self.blocks, "stranger") == [0]
        self.index.leave("b")
        assert self.usable(self.blocks, "b") == [0], "a worker that left holds nothing"

    def test_what_was_removed_is_gone(self) -> None:
        self.index.join(make_info())
        teller = Teller(self.index)
        teller.stored(self.blocks)
        teller.removed([*make_chain("never stored", 1), *self.blocks[7:]])
        assert self.usable(self.blocks) == [7]
        teller.removed([self.blocks[2]])
        assert self.usable(self.blocks) == [2], "blocks behind a hole are of no use"
        teller.stored([self.blocks[2]], self.blocks[1])
        assert self.usable(self.blocks) == [7], "blocks behind a hole come back when it is filled"
        teller.tell(KVEvent("cleared"))
        assert self.usable(self.blocks) == [0]

    def test_a_block_lives_while_a_tier_holds_it(self) -> None:
        self.index.join(make_info())
        teller = Teller(self.index)
        teller.stored(self.blocks)
        teller.stored(self.blocks[4::-1], tier="host")  # in any order, without parents
        assert self.reach(self.blocks)[1] == 9
        teller.removed(self.blocks)
        assert self.reach(self.blocks)[1] == 5
        teller.tell(KVEvent("cleared", tier="host"))
        assert self.reach(self.blocks)[1] == 0
        teller.stored(self.blocks[:6])
        teller.stored(self.blocks, tier="host")
        teller.tell(KVEvent("cleared", tier="host"))
        assert self.reach(self.blocks)[1] == 6, "the device's were not cleared"

    def test_slower_tiers_are_told_apart(self) -> None:
        self.index.join(make_info())
        self.index.join(make_info("other", tiers=("fast", "device", "disk")))
        if not isinstance(self.index, TieredIndex):
            return
        teller = Teller(self.index)
        teller.stored(self.blocks[:4])
        teller.stored(self.blocks[2:7], tier="host")
        teller.stored(self.blocks[8:], tier="host")
        assert self.reach(self.blocks) == (4, 7), "tiers may take turns; behind a hole nothing is of use"
        assert self.reach(self.blocks[:3]) == (3, 3)
        teller.removed(self.blocks[1:2])
        assert self.reach(self.blocks) == (1, 1)
        teller.stored(self.blocks[1:2], tier="host")
        assert self.reach(self.blocks) == (1, 7)
        teller.stored(self.blocks[1:2], self.blocks[0])
        teller.stored(self.blocks[4:], self.blocks[3])
        assert self.reach(self.blocks) == (9, 9)
        assert self.index.loadable(b"".join(self.blocks), [("stranger", 0), ("w", 0)]) == [0, 0]
        teller = Teller(self.index, "other")
        teller.stored(self.blocks[:2], tier="fast")
        teller.stored(self.blocks[:5], tier="device")
        teller.stored(self.blocks[5:6], tier="disk")
        assert self.reach(self.blocks, "other") == (2, 6), "the worker says which tier is its first"

    def test_what_is_predicted_need_not_be_loaded(self) -> None:
        self.index.join(make_info())
        if not isinstance(self.index, TieredIndex):
            return
        Teller(self.index).stored(self.blocks[:6], tier="host")
        self.index.predict("w", 0, b"".join(self.blocks[:4]), 2.0)
        assert self.reach(self.blocks) == (4, 6)
        assert self.reach(self.blocks[:3]) == (3, 3)
        self.clock.now = 2.1
        assert self.reach(self.blocks) == (0, 6)
        self.index.predict("w", 0, b"".join(self.blocks), 2.0)
        assert self.reach(self.blocks) == (9, 9)

    def test_each_rank_has_its_own(self) -> None:
        self.index.join(make_info(dp_ranks=2))
        self.index.join(make_info("one"))
        first, second = Teller(self.index), Teller(self.index, dp_rank=1)
        chain, ranks = b"".join(self.blocks), [("w", 1), ("w", 0), ("w", 2), ("one", 1)]
        assert first.stored(self.blocks[:6]) and second.stored(self.blocks[:2])
        assert self.index.overlaps(chain, ranks) == [2, 6, 0, 0]
        self.index.predict("w", 1, b"".join(self.blocks[:3]), 2.0)
        assert self.index.overlaps(chain, ranks) == [3, 6, 0, 0]
        self.index.predict("w", 0, b"".join(self.blocks[:3]), 0.0)
        assert self.index.overlaps(chain, ranks) == [3, 6, 0, 0], "the other rank's is none of its"
        assert first.removed(self.blocks[4:6])
        assert self.index.overlaps(chain, ranks) == [3, 4, 0, 0]
        second.seq += 1
        assert not second.stored(self.blocks[2:4], self.blocks[1]), "its batch 2 is missing"
        assert first.stored(self.blocks[4:5], self.blocks[3]), "the other rank has missed nothing"
        self.index.reset("w", 1, "1", 3, [KVEvent("stored", hashes=chain)])
        assert self.index.overlaps(chain, ranks) == [9, 5, 0, 0]
        assert second.tell(KVEvent("cleared"))
        assert second.stored(self.blocks[:3])
        assert self.index.overlaps(chain, ranks) == [3, 5, 0, 0]
        self.index.leave("w")
        assert self.index.overlaps(chain, ranks) == [0, 0, 0, 0]

    def test_a_gap_is_noticed_and_healed(self) -> None:
        self.index.join(make_info())
        teller = Teller(self.index)
        assert teller.stored(self.blocks[:2])
        teller.seq += 1
        assert not teller.stored(self.blocks[3:4], self.blocks[2]), "batch 2 is missing"
        assert not teller.stored(self.blocks[4:5], self.blocks[3]), "batch 2 is still missing"
        self.index.reset("w", 0, "1", 4, [KVEvent("stored", hashes=b"".join(self.blocks[:5]))])
        assert self.usable(self.blocks) == [5]
        late = EventBatch("w", 0, "1", 4, [KVEvent("removed", hashes=self.blocks[0])])
        assert self.index.apply(late), "the snapshot holds batch 4 already"
        assert self.usable(self.blocks) == [5]
        assert teller.stored(self.blocks[5:6], self.blocks[4])
        assert self.usable(self.blocks) == [6]

    def test_a_snapshot_replaces_everything(self) -> None:
        self.index.join(make_info())
        Teller(self.index).stored(self.blocks)
        self.index.reset("w", 0, "1", 7, [KVEvent("stored", hashes=b"".join(self.blocks[:2]))])
        assert self.usable(self.blocks) == [2]

    def test_another_generation_starts_empty(self) -> None:
        self.index.join(make_info())
        Teller(self.index).stored(self.blocks)
        again = Teller(self.index, generation="2")
        assert not again.stored(self.blocks[:1]), "a foreign generation needs a snapshot"
        assert self.usable(self.blocks)[0] <= 1, "its cache of the life before is gone"
        self.index.reset("w", 0, "2", 1, [KVEvent("stored", hashes=self.blocks[0])])
        assert self.usable(self.blocks) == [1]
        assert again.stored(self.blocks[1:3], self.blocks[0])
        assert self.usable(self.blocks) == [3]
        self.index.join(make_info(generation="3"))
        assert self.usable(self.blocks) == [0], "it joined anew, with an empty cache"

    def test_predictions_count_until_they_expire(self) -> None:
        self.index.join(make_info())
        self.index.predict("w", 0, b"".join(self.blocks), 2.0)
        self.index.predict("stranger", 0, b"".join(self.blocks), 2.0)
        assert self.usable(self.blocks) == [9]
        assert self.usable([*self.blocks[:4], *make_chain("y", 3)]) == [4]
        self.clock.now = 1.9
        assert self.usable(self.blocks) == [9]
        self.clock.now = 2.1
        assert self.usable(self.blocks) == [0], "nothing came of it"

    def test_a_prediction_can_be_taken_back(self) -> None:
        self.index.join(make_info())
        chain, start = b"".join(self.blocks), b"".join(self.blocks[:4])
        for hashes in (chain, chain, start):
            self.index.predict("w", 0, hashes, 2.0)
        self.index.predict("w", 0, chain, 0.0)
        assert self.usable(self.blocks) == [9], "another request predicted the same"
        self.index.predict("w", 0, chain, 0.0)
        assert self.usable(self.blocks) == [4], "its request was aborted"
        self.index.predict("w", 0, chain, 0.0)
        self.index.predict("stranger", 0, start, 0.0)
        assert self.usable(self.blocks) == [4], "there was nothing of that kind to take back"

    def test_a_prediction_ends_with_the_event_that_confirms_it(self) -> None:
        self.index.join(make_info())
        self.index.predict("w", 0, b"".join(self.blocks), 1e9)
        teller = Teller(self.index)
        teller.stored(self.blocks[:5])
        assert self.usable(self.blocks) == [9], "the rest is still on its way"
        teller.stored(self.blocks[5:], self.blocks[4])
        self.clock.now = 1.0
        teller.removed(self.blocks[6:])
        assert self.usable(self.blocks) == [6], "once confirmed, events alone count"

    def test_agrees_with_the_pools_over_all_groups(self) -> None:
        """The usable prefix is the longest position at which every group holds, to the block, for each rank
        and with each tier."""
        rng = random.Random(10)
        for n in range(self.rounds):
            kinds = tuple(rng.choice(["full", "latent", "window", "state"]) for _ in range(rng.randint(1, 4)))
            windows = tuple(rng.randint(1, 14) if kind == "window" else 0 for kind in kinds)
            worker, ranks = f"w{n}", rng.randint(1, 2)
            tiers = ("device", "host", "disk")[: rng.randint(1, 3)]
            self.index.join(make_info(worker, kinds, windows, dp_ranks=ranks, tiers=tiers))
            tellers = [Teller(self.index, worker, dp_rank=rank) for rank in range(ranks)]
            have = np.zeros((ranks, len(kinds), len(tiers), len(self.blocks)), np.bool_)
            groups = groups_from(kinds, windows, BLOCK)
            for _ in range(12):
                rank = rng.randrange(ranks)
                self._change(rng, tellers[rank], tiers, have[rank])
                for other in range(ranks):
                    everything = usable_blocks(groups, list(have[other].any(axis=1)))
                    near = usable_blocks(groups, list(have[other, :, 0]))
                    if not isinstance(self.index, TieredIndex):
                        near = everything
                    found = self.reach(self.blocks, worker, other)
                    assert found == (near, everything), f"groups {kinds}, windows {windows}, rank {other}"

    def _change(self, rng: random.Random, teller: Teller, tiers: tuple[str, ...], have: np.ndarray) -> None:
        group, tier = rng.randrange(len(have)), rng.randrange(len(tiers))
        start = rng.randrange(len(self.blocks))
        stop = rng.randint(start + 1, len(self.blocks))
        kind = rng.random()
        if kind < 0.7:
            parent = self.blocks[start - 1] if start and not tier else b""
            assert teller.stored(self.blocks[start:stop], parent, group, tiers[tier])
            have[group, tier, start:stop] = True
        elif kind < 0.97:
            assert teller.removed(self.blocks[start:stop], group, tiers[tier])
            have[group, tier, start:stop] = False
        else:
            assert teller.tell(KVEvent("cleared", tier=tiers[tier]))
            have[:, tier] = False
