from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bien.core.kv.pool import BlockPool


def test_a_fresh_pool_hands_out_ascending_runs_and_never_block_0():
    pool = BlockPool(10)
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]
    assert pool.allocate(6).tolist() == [5, 6, 7, 8, 9, 10]
    with pytest.raises(AssertionError, match="1 blocks asked of 0"):
        pool.allocate(1)


def test_freed_runs_come_back_first_and_in_order():
    pool = BlockPool(10)
    ids = pool.allocate(8)
    pool.unref(ids[2:5])
    assert pool.allocate(3).tolist() == [3, 4, 5]


class PoolMachine(RuleBasedStateMachine):
    """Against plain dicts, one block at a time."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9)
        self.refs: dict[int, int] = {}  # of every block that is not free
        self.cached: set[int] = set()
        self.births = dict.fromkeys(range(1, 10), 0)

    def some(self, data, blocks):
        chosen = data.draw(st.lists(st.sampled_from(sorted(blocks)), unique=True, min_size=1))
        return np.array(chosen, np.int32)

    def settle(self):
        self.refs = {b: n for b, n in self.refs.items() if n or b in self.cached}

    @rule(n=st.integers(0, 9))
    def allocate(self, n):
        if n <= 9 - len(self.refs):
            ids = self.pool.allocate(n).tolist()
            assert len(set(ids)) == n and not set(ids) & set(self.refs) and 0 not in ids
            for b in ids:
                self.refs[b] = 1
                self.births[b] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def ref(self, data):
        ids = self.some(data, self.refs)
        self.pool.ref(ids)
        for b in ids.tolist():
            self.refs[b] += 1

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def unref(self, data):
        ids = self.some(data, [b for b, n in self.refs.items() if n])
        self.pool.unref(ids)
        for b in ids.tolist():
            self.refs[b] -= 1
        self.settle()

    @precondition(lambda self: any(n for b, n in self.refs.items() if b not in self.cached))
    @rule(data=st.data())
    def cache(self, data):
        ids = self.some(data, [b for b, n in self.refs.items() if n and b not in self.cached])
        self.pool.cache(ids)
        self.cached |= set(ids.tolist())

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data):
        ids = self.some(data, self.cached)
        self.pool.uncache(ids)
        self.cached -= set(ids.tolist())
        self.settle()

    @invariant()
    def agrees(self):
        pool = self.pool
        assert sorted(pool.free_blocks().tolist()) == [b for b in range(1, 10) if b not in self.refs]
        assert pool.referenced == sum(n > 0 for n in self.refs.values())
        assert pool.idle == sum(n == 0 for n in self.refs.values())
        assert pool.available == 9 - pool.referenced
        assert pool.refs.tolist() == [self.refs.get(b, 0) for b in range(10)]
        assert set(np.flatnonzero(pool.cached).tolist()) == self.cached
        assert pool.births[1:].tolist() == list(self.births.values())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40)


def test_pins_are_references_of_their_own():
    pool = BlockPool(3)
    ids = pool.allocate(2)
    pool.cache(ids[:1])
    pool.pin(ids)
    pool.unref(ids)
    assert (pool.referenced, pool.idle, pool.free) == (2, 0, 1)
    assert pool.pins[ids].tolist() == [1, 1]
    pool.unpin(ids)
    assert (pool.referenced, pool.idle, pool.free) == (0, 1, 2)
    assert not pool.pins.any()
