"""`SequenceKV`: what one running sequence holds in every group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bien.core.kv.groups import KVGroup
from bien.core.kv.pool import I32
from bien.core.kv.tree import Node


class SequenceKV:
    """Block tables of one running sequence, one per group. Written by `KVCache` only."""

    __slots__ = (
        "attached",
        "blocks",
        "capacity",
        "changes",
        "committed",
        "count",
        "first",
        "groups",
        "live",
        "loads",
        "node",
        "released",
        "reported",
        "shadows",
        "slides_at",
        "snapshots",
        "sources",
    )

    def __init__(self, groups: Sequence[KVGroup], root: Node, blocks: int) -> None:
        n = len(groups)
        self.groups = groups
        self.attached = blocks  # blocks it started with
        self.count = 0  # entries of every paged group's table
        self.capacity = 0  # tokens that the tables have room for
        self.first = [0] * n  # entries before it were slid out (WINDOW)
        self.blocks: I32 = np.zeros((n, max(16, blocks + 16)), np.int32)  # the tables; 0: null block
        self.live = [0] * n  # STATE: the block that steps update
        self.sources = [0] * n  # STATE: the snapshot to restore from, held until it has been used
        self.loads: dict[int, int] = {}  # STATE group: source that a store fills, not yet shared
        self.snapshots: dict[int, set[int]] = {}  # STATE group: blocks for snapshots to come
        # Cached twins of private blocks: held so that the path above what it commits cannot be evicted.
        self.shadows: list[tuple[int, I32]] = []
        self.committed = 0  # blocks of its chain known to be in the tree
        self.node = root  # held block committed - 1 once; see PrefixTree.locate
        self.slides_at = 0  # the next position at which a window leaves a block behind
        self.reported = [0] * n
        self.changes: list[list[tuple[int, int]]] = [[] for _ in groups]
        self.released = False

    def take_updates(self, group: int) -> list[tuple[int, int]]:
        """(index, block) entries that changed since the last call, for the executor's block tables.

        STATE groups have index 0 = the live block. Entries that slid out of a window come as block 0.
        Entries never reported are the null block: a slot's row starts as zeros.
        """
        if not self.groups[group].paged:
            if self.reported[group]:
                return []
            self.reported[group] = 1
            return [(0, self.live[group])]
        start, stop = self.reported[group], self.count
        out = self.changes[group]
        if start == stop:
            if out:
                self.changes[group] = []
            return out
        self.changes[group] = []
        self.reported[group] = stop
        start = max(start, self.first[group])
        out.extend(zip(range(start, stop), self.blocks[group, start:stop].tolist(), strict=True))
        return out

    def take_update_arrays(self, group: int) -> tuple[I32, I32]:
        """`take_updates` as (indices, blocks), without a Python object per block."""
        start, stop = max(self.reported[group], self.first[group]), self.count
        if self.groups[group].paged and not self.changes[group]:
            self.reported[group] = self.count
            return np.arange(start, stop, dtype=np.int32), self.blocks[group, start:stop].copy()
        pairs = np.array(self.take_updates(group), np.int32).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def table(self, group: int) -> I32:
        """The whole table of a paged group (a copy); 0 where it holds nothing."""
        return self.blocks[group, : self.count].copy()

    def held(self, group: int) -> list[int]:
        """Every reference it has in a group, with multiplicity (for `check_integrity`)."""
        if not self.groups[group].paged:
            blocks = [self.live[group], self.sources[group], *self.snapshots.get(group, ())]
            return [b for b in blocks if b]
        row: list[int] = self.blocks[group, self.first[group] : self.count].tolist()
        return row + [b for g, twins in self.shadows if g == group for b in twins.tolist()]

    def grow(self, count: int) -> None:
        """Room for `count` entries."""
        if count > self.blocks.shape[1]:
            blocks = np.zeros((len(self.groups), max(count, 2 * self.count)), np.int32)
            blocks[:, : self.count] = self.blocks[:, : self.count]
            self.blocks = blocks
