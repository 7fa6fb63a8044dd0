"""KVCache against a slow model: random lives of sequences, with the device's memory played by a dict.

The model writes into blocks what a real device would hold, and builds its own view of the cache from the
events alone. Whatever a match promises must be in memory, and the events must tell exactly what is cached.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind
from tests.core.kv.chains import BT, DRAFT, FULL, STATE, WINDOW, chain, split

SLOTS = 4
EXAMPLES = int(os.environ.get("BIEN_TEST_EXAMPLES", "40"))
PHASES = [p for p in Phase if p is not Phase.explain]


class Live:
    def __init__(self, kv, words, computed):
        self.kv, self.words, self.computed = kv, words, computed
        self.tables = {}  # paged group -> what an executor's block table says
        self.fresh = True  # the first step restores the states
        self.pending = {}  # group -> (block, tokens) of a snapshot that has not been kept yet

    @property
    def hashes(self):
        return chain(self.words[: self.computed // BT])


def machine(groups, sizes):
    paged = [g for g, group in enumerate(groups) if group.paged]
    states = [g for g, group in enumerate(groups) if not group.paged]

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.cache = KVCache(groups, sizes, BT, SLOTS)
            self.memory = {}  # (group, block) -> the content hash that is really there
            self.stored = [set() for _ in groups]  # from events
            self.live: list[Live] = []
            self.pins: list[tuple[int, list[int]]] = []

        # -- the slow truth

        def holds(self, g, hashes, p):
            names = split(hashes)
            group = groups[g]
            if group.kind is GroupKind.STATE:
                return p == 0 or names[p - 1] in self.stored[g]
            low = 0
            if group.kind is GroupKind.WINDOW and group.window:
                low = max(0, p * BT - group.window) // BT
            return all(names[i] in self.stored[g] for i in range(low, p))

        def usable(self, hashes):
            at = range(len(hashes) // 16, -1, -1)
            return next(p for p in at if all(self.holds(g, hashes, p) for g in range(len(groups))))

        def drain(self):
            for event in self.cache.take_events():
                names = split(event.hashes)
                if event.op == "stored":
                    assert not self.stored[event.group] & set(names), "stored twice"
                    self.stored[event.group] |= set(names)
                else:
                    assert event.op == "removed"
                    assert self.stored[event.group] >= set(names), "removed what was not there"
                    self.stored[event.group] -= set(names)

        def write(self, g, block, content):
            assert block > 0
            assert not self.cache.pools[g].cached[block], "a cached block is written"
            self.memory[g, block] = content

        # -- rules

        @precondition(lambda self: len(self.live) < SLOTS)
        @rule(
            words=st.lists(st.integers(0, 1), max_size=9),
            beyond=st.integers(0, 3),
            loads=st.booleans(),
            stale=st.booleans(),
        )
        def attach(self, words, beyond, loads, stale):
            hashes = chain(words)
            match = self.cache.match(hashes)
            assert match.blocks == self.usable(hashes)
            blocks = max(0, match.blocks - beyond) if not loads else min(len(words), match.blocks + beyond)
            if stale:  # the world moves on between match and attach
                for g, pool in enumerate(self.cache.pools):
                    self.cache.tree.evict(g, min(pool.free + 3, pool.available))
            before = [self.cache.usage(g) for g in range(len(groups))]
            got = self.cache.attach(hashes, match, blocks)
            if got is None:
                assert before == [self.cache.usage(g) for g in range(len(groups))], "a failure changed pools"
                return
            kv, missing = got
            if blocks == match.blocks and not stale:
                assert missing == []
            for miss in missing:
                assert len(split(miss.hashes)) == len(miss.blocks) > 0
                for name, block in zip(split(miss.hashes), miss.blocks, strict=True):
                    self.write(miss.group, block, name)  # the load
            names = split(hashes)
            for g in paged:
                updates = dict(kv.take_updates(g))
                low = kv.first[g]
                assert sorted(updates) == list(range(low, blocks))
                for i, block in updates.items():
                    assert self.memory[g, block] == names[i], "a block does not hold what it is matched for"
            for g in states:
                source, live_block = self.cache.restore(kv, g)
                assert kv.take_updates(g) == [(0, live_block)]
                assert bool(source) == bool(blocks)
            seq = Live(kv, words, blocks * BT)
            for g in paged:
                seq.tables[g] = {i: b for i, b in enumerate(kv.table(g).tolist()) if b}
            if missing:
                self.cache.commit(kv, hashes, blocks * BT)
                self.drain()
                for miss in missing:
                    assert set(split(miss.hashes)) <= self.stored[miss.group], "loaded, but not shared"
            self.live.append(seq)

        @precondition(lambda self: self.live)
        @rule(data=st.data(), tokens=st.integers(1, 14), commit=st.booleans(), snapshot=st.booleans())
        def step(self, data, tokens, commit, snapshot):
            seq = data.draw(st.sampled_from(self.live))
            kv, stop = seq.kv, seq.computed + tokens
            if snapshot and states:
                stop = -(-stop // BT) * BT
            need = max(0, -(-stop // BT) - kv.count)
            fits = all(self.cache.available(g) >= need for g in paged)
            before = [self.cache.usage(g) for g in range(len(groups))]
            assert self.cache.reserve(kv, stop) == fits
            if not fits:
                assert before == [self.cache.usage(g) for g in range(len(groups))]
                return
            while len(seq.words) * BT < stop:
                seq.words = [*seq.words, data.draw(st.integers(0, 1))]
            names = split(chain(seq.words))
            for g in paged:
                seq.tables[g].update(kv.take_updates(g))
                table = kv.table(g)
                assert [seq.tables[g].get(i, 0) for i in range(kv.count)] == table.tolist()
                for i in range(seq.computed // BT, -(-stop // BT)):
                    self.write(g, int(table[i]), names[i] if (i + 1) * BT <= stop else b"part")
                low = kv.first[g]
                for i in range(low, stop // BT):
                    assert self.memory[g, int(table[i])] == names[i], "lost while the sequence runs"
            if seq.fresh:
                seq.fresh = False
                start = kv.attached
                for g in states:
                    source, _ = self.cache.restore(kv, g)
                    assert not start or self.memory[g, source] == names[start - 1], "not the state to restore"
            taken = {}
            if snapshot:
                for g in states:
                    taken[g] = self.cache.snapshot_block(kv, g)
            for g in states:
                self.memory[g, kv.live[g]] = names[stop // BT - 1] if stop % BT == 0 else b"part"
                if taken.get(g):
                    self.write(g, taken[g], names[stop // BT - 1])
            seq.computed = stop
            if commit or snapshot:
                self.cache.commit(kv, seq.hashes, stop)
                self.drain()
                for g in paged:
                    if groups[g].kind is not GroupKind.WINDOW:
                        assert set(split(seq.hashes)) <= self.stored[g], "committed, but not stored"
                self.cache.slide(kv, stop)
            for g, block in taken.items():
                if block and data.draw(st.booleans()):
                    self.cache.keep_snapshot(kv, g, seq.hashes, stop, block)
                    self.drain()
                    assert names[stop // BT - 1] in self.stored[g]
                elif block:
                    seq.pending[g] = block
            for g, block in list(seq.pending.items()):
                if data.draw(st.booleans()):
                    self.cache.drop_snapshot(kv, g, block)
                    del seq.pending[g]

        @precondition(lambda self: self.live)
        @rule(data=st.data())
        def release(self, data):
            seq = data.draw(st.sampled_from(self.live))
            self.live.remove(seq)
            self.cache.release(seq.kv)
            self.cache.release(seq.kv)

        @rule(data=st.data())
        def pin(self, data):
            for g, hashes, blocks in self.cache.take_committed():
                for name, block in zip(split(hashes), blocks, strict=True):
                    assert self.memory[g, block] == name, "offered for saving, but holds something else"
                if data.draw(st.booleans()):
                    self.cache.pin(g, blocks)
                    self.pins.append((g, blocks))

        @precondition(lambda self: self.pins)
        @rule()
        def unpin(self):
            self.cache.unpin(*self.pins.pop(0))

        @precondition(lambda self: states)
        @rule(data=st.data())
        def forget(self, data):
            g = data.draw(st.sampled_from(states))
            hashes = chain(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5)))
            gone = self.cache.forget_snapshot(g, hashes, len(hashes) // 16 * BT)
            there = hashes[-16:] in self.stored[g]
            assert gone <= there
            self.drain()
            assert (hashes[-16:] in self.stored[g]) == (there and not gone)

        @rule(g=st.integers(0, len(groups) - 1), n=st.integers(1, 6))
        def pressure(self, g, n):
            pool = self.cache.pools[g]
            if pool.available >= n:
                in_use = [p.cached & (p.refs > p.pins) for p in self.cache.pools]
                self.cache.tree.evict(g, n)
                assert pool.free >= n
                for p, used in zip(self.cache.pools, in_use, strict=True):
                    assert p.cached[used].all(), "a block in use was evicted"

        @invariant()
        def consistent(self):
            self.drain()
            self.cache.check_integrity([seq.kv for seq in self.live])
            for seq in self.live:
                for g in self.cache.tree.anchors:
                    path = split(chain(seq.words))[: seq.kv.committed]
                    assert set(path) <= self.stored[g], "a path in use was evicted"
            stored = [set() for _ in groups]
            for event in self.cache.snapshot():
                names = split(event.hashes)
                assert not event.parent or any(event.parent in s for s in stored) or not paged_only(groups)
                stored[event.group] |= set(names)
            assert stored == self.stored, "events and pools disagree"

        def teardown(self):
            for seq in self.live:
                self.cache.release(seq.kv)
            for g, blocks in self.pins:
                self.cache.unpin(g, blocks)
            self.cache.check_integrity([])
            for g in range(len(groups)):
                referenced, idle, free = self.cache.usage(g)
                assert referenced == 0 and idle + free == sizes[g]
                self.cache.tree.evict(g, sizes[g])
                self.cache.check_integrity([])
            assert not self.cache.tree.root.children, "an empty cache still has a tree"

    return Machine


def paged_only(groups):
    return all(group.kind not in (GroupKind.WINDOW, GroupKind.STATE) for group in groups)


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        pytest.param((FULL,), (14,), id="full"),
        pytest.param((FULL, DRAFT), (14, 17), id="full+draft"),
        pytest.param((FULL, WINDOW, STATE), (18, 12, 7), id="full+window+state"),
        pytest.param((WINDOW, FULL), (30, 13), id="window+full"),
        pytest.param((WINDOW, STATE), (14, 6), id="window+state"),
        pytest.param((STATE,), (8,), id="state"),
    ],
)
def test_model(groups, sizes):
    run_state_machine_as_test(
        machine(groups, sizes),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            phases=PHASES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_model_sees_content():
    # The model itself: a wrong byte in memory is noticed at the next match.
    m = machine((FULL,), (14,))()
    hashes = chain([0, 1])
    kv, _ = m.cache.attach(hashes, m.cache.match(hashes), 0)
    assert m.cache.reserve(kv, 2 * BT)
    for i, block in kv.take_updates(0):
        m.write(0, block, split(hashes)[i])
    m.cache.commit(kv, hashes, 2 * BT)
    m.cache.release(kv)
    m.drain()
    m.memory[0, int(np.flatnonzero(m.cache.pools[0].cached)[0])] = b"other"
    with pytest.raises(AssertionError, match="does not hold"):
        m.attach([0, 1], 0, False, False)
