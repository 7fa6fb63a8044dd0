"""Snapshots of recurrent state: where they are taken, kept and dropped.

A state can only be reused at the exact position of a snapshot. Three kinds of positions are taken: the
last block boundary of a prompt, every N tokens (the group's policy), and, while decoding, the newest
block boundary only ("rolling"), which becomes shared when the turn ends or the sequence is preempted.
"""

from __future__ import annotations

from bien.core.flight import FlightItem
from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.plan import StateCopy
from bien.core.sequence import Sequence


class Snapshots:
    def __init__(self, cache: KVCache, groups: tuple[KVGroup, ...], block_tokens: int) -> None:
        self._cache = cache
        self._states = [(i, g) for i, g in enumerate(groups) if g.kind is GroupKind.STATE]
        self._block = block_tokens

    def limit(self, s: Sequence, tokens: int) -> int:
        """The largest chunk <= `tokens` that does not run over a position to be taken."""
        if not self._states:
            return tokens
        end = s.planned + tokens
        for _, group in self._states:
            last = (s.known - 1) // self._block * self._block
            if s.planned < last < end:
                end = last
            every = group.snapshot.every_tokens // self._block * self._block
            if every:
                step = (s.planned // every + 1) * every
                if s.planned < step < end:
                    end = step
        return end - s.planned

    def plan(self, items: list[FlightItem]) -> list[StateCopy]:
        """Reserve blocks for the snapshots of a step."""
        copies: list[StateCopy] = []
        for item in items if self._states else ():
            s = item.sequence
            for g, group in self._states:
                for position in self._positions(s, item, group):
                    block = self._reserve(item, g, position)
                    if block:
                        assert s.kv is not None
                        live = self._cache.restore(s.kv, g)[1]
                        copies.append(StateCopy(g, s.slot, position, live, block))
        return copies

    def take(self, item: FlightItem, position: int) -> None:
        """`plan` for one decode of a jump, which copies nothing: it ends at `position`."""
        if self._states and not position % self._block:
            for g, _ in self._states:
                self._reserve(item, g, position)

    def replaceable(self, sequences: list[Sequence], at_once: int) -> bool:
        """Whether the next snapshots of all, `at_once` of them at a time, do nothing but replace older ones,
        so that in a jump only the last of each need be taken."""
        if not all(s.rolling.keys() >= {g for g, _ in self._states} for s in sequences):
            return False
        return all(self._cache.usage(g)[2] >= at_once for g, _ in self._states)

    def settle(self, item: FlightItem, s: Sequence) -> None:
        """The step of `item` has ended and `s.computed` is up to date."""
        if not item.snapshots:
            return
        if s.kv is not None:
            for g, position, block in item.snapshots:
                if s.computed < position:
                    self._cache.drop_snapshot(s.kv, g, block)
                elif item.samples:
                    self._roll(s, g, position, block)
                else:
                    self._cache.keep_snapshot(s.kv, g, s.hashes, position, block)
        item.snapshots.clear()

    def keep(self, s: Sequence) -> None:
        """The turn ended or was preempted: share the rolling snapshots."""
        for g, (position, block) in s.rolling.items():
            assert s.kv is not None
            self._cache.keep_snapshot(s.kv, g, s.hashes, position, block)
        s.rolling.clear()

    def _reserve(self, item: FlightItem, g: int, position: int) -> int:
        kv = item.sequence.kv
        assert kv is not None
        block = self._cache.snapshot_block(kv, g)
        if block:
            item.snapshots.append((g, position, block))
        return block

    def _positions(self, s: Sequence, item: FlightItem, group: KVGroup) -> range:
        # A row gives states only at its end and inside its verify window, and which of its drafts are taken
        # is not known yet: each block boundary there may be the newest one. Ascending: the nearest is reached
        # most often.
        end, size = item.start + item.count, self._block
        if item.samples:
            first = max(item.start + 1, end - item.drafts)
            return range(-(-first // size) * size, end + 1, size)
        every = group.snapshot.every_tokens // size * size
        last = (s.known - 1) // size * size
        taken = end % size == 0 and (end == last or (every and end % every == 0))
        return range(end, end + 1) if taken and end > item.start else range(0)

    def _roll(self, s: Sequence, g: int, position: int, block: int) -> None:
        assert s.kv is not None
        old = s.rolling.get(g)
        if old is not None:
            self._cache.drop_snapshot(s.kv, g, old[1])
        s.rolling[g] = (position, block)
