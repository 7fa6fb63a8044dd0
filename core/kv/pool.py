"""`BlockPool`: the blocks of one group: a free stack, reference counts and the cached flag."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class BlockPool:
    """Blocks 1..size; block 0 is the null block and never allocated.

    A block is free (on the stack), referenced (`refs` > 0), or idle (cached, `refs` 0: evictable).
    `free + idle + referenced == size`, always. Ids within one call must be distinct.
    """

    __slots__ = ("_stack", "births", "cached", "free", "idle", "pins", "refs", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.refs: I32 = np.zeros(size + 1, np.int32)  # holds of sequences plus pins
        self.pins: I32 = np.zeros(size + 1, np.int32)  # the part of `refs` that transfers hold
        self.cached: NDArray[np.bool_] = np.zeros(size + 1, np.bool_)  # it is in the prefix tree
        self.births: I32 = np.zeros(size + 1, np.int32)  # allocations so far: tells a reused block
        self.free = size
        self.idle = 0
        # The top is at the end: fresh pools hand out 1, 2, 3 ... so that runs are contiguous in memory.
        self._stack: I32 = np.arange(size, 0, -1, dtype=np.int32)

    @property
    def available(self) -> int:
        """Blocks that can be had now: free ones and idle ones, which must be evicted first."""
        return self.free + self.idle

    @property
    def referenced(self) -> int:
        return self.size - self.free - self.idle

    def free_blocks(self) -> I32:
        """The ids on the free stack."""
        return self._stack[: self.free].copy()

    def allocate(self, n: int) -> I32:
        """n blocks with one reference each. The caller has seen that `free >= n`."""
        assert n <= self.free, f"{n} blocks asked of {self.free} free ones"
        self.free -= n
        ids = self._stack[self.free : self.free + n][::-1].copy()
        self.refs[ids] = 1
        self.births[ids] += 1
        return ids

    def take(self) -> int:
        """`allocate` of a single block."""
        assert self.free, "a block asked of none that are free"
        self.free -= 1
        id = int(self._stack[self.free])
        self.refs[id] = 1
        self.births[id] += 1
        return id

    def ref(self, ids: I32) -> None:
        """One more reference to blocks that are cached or referenced."""
        refs = self.refs[ids]
        if self.idle:
            self.idle -= len(refs) - int(np.count_nonzero(refs))
        self.refs[ids] = refs + 1

    def unref(self, ids: I32) -> None:
        """One reference less; at zero a cached block is idle and any other is free."""
        refs = self.refs[ids] - 1
        self.refs[ids] = refs
        held = int(np.count_nonzero(refs))
        if held == len(refs):
            return
        zero = ids[refs == 0] if held else ids
        kept = self.cached[zero]
        idle = int(np.count_nonzero(kept))
        self.idle += idle
        if idle != len(zero):
            self._push(zero[~kept])

    def drop(self, id: int) -> None:
        """`unref` of a single block."""
        left = int(self.refs[id]) - 1
        self.refs[id] = left
        if left:
            return
        if self.cached[id]:
            self.idle += 1
        else:
            self._stack[self.free] = id
            self.free += 1

    def cache(self, ids: I32) -> None:
        """Referenced blocks entered the tree."""
        self.cached[ids] = True

    def uncache(self, ids: I32) -> None:
        """Blocks left the tree: idle ones are free, referenced ones belong to their holders alone."""
        self.cached[ids] = False
        refs = self.refs[ids]
        idle = ids[refs == 0] if np.count_nonzero(refs) else ids
        if len(idle):
            self.idle -= len(idle)
            self._push(idle)

    def pin(self, ids: I32) -> None:
        """A reference for a transfer."""
        self.ref(ids)
        self.pins[ids] += 1

    def unpin(self, ids: I32) -> None:
        self.pins[ids] -= 1
        self.unref(ids)

    def _push(self, ids: I32) -> None:
        self._stack[self.free : self.free + len(ids)] = ids[::-1]
        self.free += len(ids)
