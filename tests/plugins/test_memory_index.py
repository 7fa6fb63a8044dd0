from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.clock import Clock, VirtualClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.prefix import groups_from, usable_blocks
from bien.core.providers import Context
from bien.core.worker.messages import WorkerInfo
from bien.gateway.index import KVIndex
from bien.gateway.testing.index import HandClock, IndexSuite, Teller, make_chain
from bien.plugins.indexes._mirror.chain import Chain
from bien.plugins.indexes._mirror.engine import Engine
from bien.plugins.indexes._mirror.groups import Everywhere, Somewhere
from bien.plugins.indexes._mirror.plain import PlainTable
from bien.plugins.indexes._mirror.runs import Runs
from bien.plugins.indexes._mirror.table import TableChoice
from bien.plugins.indexes.memory import MemoryConfig, MemoryIndex, bien_providers


class TestCompiled(IndexSuite):
    def build(self, clock: Clock) -> KVIndex:
        return MemoryIndex(clock, "native")


class TestInPython(IndexSuite):
    def build(self, clock: Clock) -> KVIndex:
        return MemoryIndex(clock, "python")


@pytest.fixture(params=["native", "python"])
def table(request: pytest.FixtureRequest) -> TableChoice:
    return request.param  # type: ignore[no-any-return]


def info(
    worker: str = "w",
    kinds: tuple[str, ...] = ("full",),
    windows: tuple[int, ...] = (0,),
    every: tuple[int, ...] = (0,),
    generation: str = "1",
) -> WorkerInfo:
    return WorkerInfo(
        worker, generation, "fp", block_tokens=4, group_kinds=kinds, group_windows=windows,
        snapshot_tokens=every,
    )  # fmt: skip


def index_of(*infos: WorkerInfo, table: TableChoice = "native") -> MemoryIndex:
    index = MemoryIndex(HandClock(), table)
    for i in infos:
        index.join(i)
    return index


def stored(hashes: list[bytes], parent: bytes = b"", group: int = 0, tier: str = "device") -> KVEvent:
    return KVEvent("stored", group, parent, b"".join(hashes), tier)


def removed(hashes: list[bytes], group: int = 0, tier: str = "device") -> KVEvent:
    return KVEvent("removed", group, b"", b"".join(hashes), tier)


def whole_group(index: MemoryIndex) -> Everywhere | Runs:
    assert isinstance(index._table, PlainTable)
    (engine,) = index._table._engines.values()
    group = engine.near.whole[0]
    assert not isinstance(group, Somewhere)
    return group


def test_the_provider_builds_it(table: TableChoice) -> None:
    (provider,) = bien_providers()
    assert (provider.kind, provider.name) == ("kv_index", "memory")
    index = provider.factory(MemoryConfig(table), Context(clock=VirtualClock()))
    assert isinstance(index, MemoryIndex) and index.table == table


def test_depth_of_each_worker(table: TableChoice) -> None:
    index = index_of(info("a"), info("b"), info("c"), table=table)
    blocks = make_chain("x", 9)
    Teller(index, "a").tell(stored(blocks[:6]))
    Teller(index, "b").tell(stored(blocks))
    targets = [("a", 0), ("b", 0), ("c", 0), ("gone", 0), ("a", 1)]
    assert index.overlaps(b"".join(blocks), targets) == [6, 9, 0, 0, 0]
    assert index.overlaps(b"".join(blocks[:3]), targets) == [3, 3, 0, 0, 0]
    assert index.overlaps(b"", targets) == [0] * 5
    index.leave("b")
    assert index.overlaps(b"".join(blocks), targets) == [6, 0, 0, 0, 0]


def test_a_gap_and_a_foreign_generation_ask_for_a_snapshot(table: TableChoice) -> None:
    index = index_of(info(), table=table)
    feed = Teller(index)
    blocks = make_chain("x", 4)
    key = b"".join(blocks)
    assert feed.tell(stored(blocks[:1]))
    feed.seq += 1
    assert not feed.tell(stored(blocks[1:2], blocks[0]))
    assert not feed.tell(stored(blocks[2:3], blocks[1]))  # still lost
    index.reset("w", 0, "1", 4, [stored(blocks[:3])])
    assert index.overlaps(key, [("w", 0)]) == [3]
    assert index.apply(EventBatch("w", 0, "1", 4, [removed(blocks[:3])]))  # the snapshot held it
    assert index.overlaps(key, [("w", 0)]) == [3]
    assert index.apply(EventBatch("w", 0, "1", 5, [stored(blocks[3:], blocks[2])]))
    assert index.overlaps(key, [("w", 0)]) == [4]
    assert not index.apply(EventBatch("w", 0, "h", 1, [stored(blocks[:1])]))
    assert index.overlaps(key, [("w", 0)]) == [0]
    index.reset("w", 0, "h", 1, [stored(blocks[:1])])
    assert index.overlaps(key, [("w", 0)]) == [1]
    assert not index.apply(EventBatch("stranger", 0, "1", 1, []))
    index.reset("stranger", 0, "1", 1, [stored(blocks)])
    assert index.overlaps(key, [("stranger", 0)]) == [0]


def test_holes_switch_bisection_off_until_they_close() -> None:
    index = index_of(info(), table="python")
    feed = Teller(index)
    blocks = make_chain("x", 32)
    key = b"".join(blocks)
    feed.tell(stored(blocks))
    feed.tell(removed(blocks[5:6]))  # bisection alone would say 32
    assert index.overlaps(key, [("w", 0)]) == [5]
    feed.tell(stored(blocks[5:6], blocks[4]))
    assert index.overlaps(key, [("w", 0)]) == [32]
    whole = whole_group(index)
    assert isinstance(whole, Everywhere) and whole.orphans == 0
    feed.tell(removed([make_chain("other", 1)[0], blocks[31]]))  # an unknown block spoils no removal
    assert index.overlaps(key, [("w", 0)]) == [31]
    feed.tell(KVEvent("cleared"))
    assert index.overlaps(key, [("w", 0)]) == [0]


def test_a_block_is_there_while_any_tier_holds_it(table: TableChoice) -> None:
    index = index_of(info(), table=table)
    feed = Teller(index)
    blocks = make_chain("x", 4)
    key = b"".join(blocks)

    def reach() -> tuple[int, int]:
        return index.overlaps(key, [("w", 0)])[0], index.loadable(key, [("w", 0)])[0]

    feed.tell(stored(blocks))
    feed.tell(stored(blocks[::-1], tier="host"))  # in any order, without parents
    assert reach() == (4, 0)
    feed.tell(removed(blocks))
    assert reach() == (0, 4)
    feed.tell(removed(blocks[2:3], tier="disk"))
    feed.tell(removed(blocks[2:3], tier="host"))
    assert reach() == (0, 2)
    feed.tell(KVEvent("cleared", tier="host"))
    assert reach() == (0, 0)
    feed.tell(stored(blocks[1:], tier="host"))
    assert reach() == (0, 0)
    feed.tell(stored(blocks[:1], tier="host"))
    assert reach() == (0, 4)
    feed.tell(stored(blocks[:3]))
    assert reach() == (3, 1)


def test_predictions_end_by_time_or_by_event(table: TableChoice) -> None:
    index = index_of(info(), table=table)
    clock = index._clock
    assert isinstance(clock, HandClock)
    blocks, target = make_chain("x", 6), [("w", 0)]
    fork = [*blocks[:4], *make_chain("y", 3)]
    index.predict("w", 0, b"".join(blocks), 2.0)
    index.predict("gone", 0, b"".join(blocks), 2.0)
    assert index.overlaps(b"".join(blocks), target) == [6]
    assert index.overlaps(b"".join(fork), target) == [4]
    assert index.overlaps(b"".join(blocks[:2]), target) == [2]
    clock.now = 2.0
    assert index.overlaps(b"".join(blocks), target) == [0]
    index.predict("w", 0, b"".join(blocks), 100.0)
    feed = Teller(index)
    feed.tell(stored(blocks[:3]))
    assert index.overlaps(b"".join(blocks), target) == [6]
    feed.tell(stored(blocks[3:], blocks[2]))
    feed.tell(removed(blocks[4:]))  # confirmed, so events alone count
    assert index.overlaps(b"".join(blocks), target) == [4]


def test_a_predicted_state_is_only_where_snapshots_are_taken(table: TableChoice) -> None:
    index = index_of(info(kinds=("full", "state"), windows=(0, 0), every=(0, 8)), table=table)
    blocks, target = make_chain("x", 7), [("w", 0)]
    index.predict("w", 0, b"".join(blocks), 9.0)
    assert index.overlaps(b"".join([*blocks, *make_chain("y", 2)]), target) == [7]
    assert index.overlaps(b"".join([*blocks[:5], *make_chain("y", 2)]), target) == [4]
    index = index_of(info(kinds=("full", "state"), windows=(0, 0), every=(0, 0)), table=table)
    index.predict("w", 0, b"".join(blocks), 9.0)
    assert index.overlaps(b"".join([*blocks[:5], *make_chain("y", 2)]), target) == [0]


KINDS = st.lists(st.sampled_from(["full", "latent", "window", "state"]), min_size=1, max_size=4)


@pytest.mark.parametrize("table", ["native", "python"])
@given(kinds=KINDS, data=st.data())
def test_agrees_with_the_pools_to_the_block(
    table: TableChoice, kinds: list[str], data: st.DataObject
) -> None:
    windows = tuple(data.draw(st.integers(1, 14)) if kind == "window" else 0 for kind in kinds)
    index = index_of(info(kinds=tuple(kinds), windows=windows, every=(0,) * len(kinds)), table=table)
    feed = Teller(index)
    n = data.draw(st.integers(1, 10))
    blocks = make_chain("x", n)
    have = [set() for _ in kinds]  # type: list[set[int]]
    # Stores and removals of any block, parents or not: what the index says must stay exact.
    for _ in range(data.draw(st.integers(0, 8))):
        group = data.draw(st.integers(0, len(kinds) - 1))
        start = data.draw(st.integers(0, n - 1))
        stop = data.draw(st.integers(start + 1, n))
        if data.draw(st.booleans()) or data.draw(st.booleans()):
            assert feed.tell(stored(blocks[start:stop], blocks[start - 1] if start else b"", group))
            have[group] |= set(range(start, stop))
        else:
            assert feed.tell(removed(blocks[start:stop], group))
            have[group] -= set(range(start, stop))
        present = [np.array([i in h for i in range(n)]) for h in have]
        expected = usable_blocks(groups_from(kinds, windows, 4), present)
        assert index.overlaps(b"".join(blocks), [("w", 0)]) == [expected]
    if isinstance(index._table, PlainTable):
        for whole in index._table._engines[0].near.whole:
            if not isinstance(whole, Everywhere):
                continue
            parents = whole.parents
            assert whole.orphans == sum(bool(p) and p not in parents for p in parents.values())


@pytest.mark.parametrize("seed", range(60))
def test_runs_of_blocks_count_as_their_blocks(seed: int) -> None:
    """Runs stored and removed in any order, against sets of single blocks."""
    rng = random.Random(seed)
    group, held = Everywhere(), dict[bytes, set[str]]()
    parents: dict[int, int] = {}
    for k in range(1, 40):  # a tree, mostly of long runs
        known = list(parents)
        parents[k] = (
            0 if not known or rng.random() < 0.1 else k - 1 if rng.random() < 0.7 else rng.choice(known)
        )

    def path(k: int) -> list[bytes]:
        out: list[bytes] = []
        while k:
            out.insert(0, b"%016d" % k)
            k = parents[k]
        return out

    for _ in range(40):
        way = path(rng.randint(1, 39))
        first = rng.randrange(len(way))
        some = way[first : rng.randrange(first, len(way)) + 1]
        tier = "device" if seed % 2 or rng.random() < 0.8 else "host"
        if rng.random() < 0.6:
            parent = way[first - 1] if first and tier == "device" else b""
            group.store(KVEvent("stored", 0, parent, b"".join(some), tier))
            for block in some:
                held.setdefault(block, set()).add(tier)
        else:
            group.remove(b"".join(some), tier)
            for block in some:
                held.get(block, set()).discard(tier)
        there = {block for block, tiers in held.items() if tiers}
        assert {block for block in map(b"%016d".__mod__, range(1, 40)) if block in group} == there
        absent = [p for b, p in group.parents.items() if p and p not in group.parents]
        assert group.orphans == len(absent)
        chain = path(rng.randint(1, 39))
        depth = next((i for i, block in enumerate(chain) if block not in there), len(chain))
        assert group.last(Chain(b"".join(chain)), len(chain)) == depth


class Tree:
    """A tree of named blocks, of which a part is present, closed upwards."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.parents = {0: -1}
        self.present: set[int] = set()
        for k in range(1, 60):  # mostly of long runs
            self.parents[k] = k - 1 if rng.random() < 0.8 else rng.randrange(k)

    def path(self, k: int) -> list[int]:
        out: list[int] = []
        while k > 0:
            out.insert(0, k)
            k = self.parents[k]
        return out

    def name(self, k: int) -> bytes:
        return b"%016d" % k if k > 0 else b""

    def grown(self) -> KVEvent:
        """A path appears, told from any block on above which all is there."""
        way = self.path(self.rng.randrange(1, 60))
        first = self.rng.randint(0, sum(k in self.present for k in way[:-1]))
        self.present.update(way)
        return stored([self.name(k) for k in way[first:]], self.name(self.parents[way[first]]))

    def cut(self) -> KVEvent | None:
        """The end of a path disappears, no further up than something else hangs on."""
        ends = sorted(k for k in self.present if not any(self.parents[c] == k for c in self.present))
        gone: list[int] = []
        for k in reversed(self.path(self.rng.choice(ends)) if ends else []):
            if gone and (self.rng.random() < 0.2 or sum(self.parents[c] == k for c in self.present) > 1):
                break
            gone.insert(0, k)
        self.present.difference_update(gone)
        return removed([self.name(k) for k in gone]) if gone else None


@pytest.mark.parametrize("seed", range(60))
def test_a_tree_of_runs_holds_what_its_events_say(seed: int) -> None:
    """Runs that grow and lose their ends stay runs; anything else is kept block by block from then on."""
    rng = random.Random(seed)
    tree, engine = Tree(rng), Engine(info())
    odd = rng.randrange(60) if seed % 2 else 60
    for step in range(60):
        event = tree.grown() if rng.random() < 0.5 else tree.cut()
        if step == odd:
            lost = rng.choice(sorted(tree.present) or [1])
            tree.present.discard(lost)
            engine.feed([event] if event else [])
            event = removed([tree.name(lost)])
        engine.feed([event] if event else [])
        for k in range(1, 60):
            way = tree.path(k)
            key = b"".join(map(tree.name, way))
            depth = next((i for i, block in enumerate(way) if block not in tree.present), len(way))
            assert engine.usable(Chain(key), 0.0) == depth
            assert engine.near.holds(key) == (k in tree.present)
        if step >= odd:
            break  # with a hole the tree is none
    if odd == 60:
        assert isinstance(engine.near.whole[0], Runs)
