"""`Runs`: the blocks of a group of every position as a tree of runs, which is what an engine tells of that
appends to chains and evicts from their ends. A run costs what `Everywhere` pays per block."""

from __future__ import annotations

from bien.core.api import HASH_BYTES, KVEvent
from bien.plugins.indexes._mirror.chain import DEVICE, Chain

MAX_FORKS = 1024


class Run:
    """Blocks that follow each other; what branches off does so behind the last. Written by `Runs`."""

    __slots__ = ("children", "hashes", "parent")

    def __init__(self, parent: Run | None, hashes: bytes | bytearray) -> None:
        self.parent = parent  # None: the root
        self.hashes = bytearray(hashes)
        self.children: dict[bytes, Run] = {}  # by their first block


class Runs:
    """Blocks of one tier, each there as long as those behind it. `store` and `remove` return False, and have
    changed nothing, where it would be otherwise: then the group must be kept block by block."""

    def __init__(self) -> None:
        self.tier = ""  # the only one there has been
        self._root = Run(None, b"")
        self._ends: dict[bytes, Run] = {}  # every run by its last block
        # Where lookups ended inside a run, by the last block found: the next chain may branch off there.
        self._forks: dict[bytes, Run] = {}

    def __len__(self) -> int:
        return sum(len(run.hashes) // HASH_BYTES for run in self._ends.values())

    def holds(self, hashes: bytes) -> bool:
        """Whether the last block of a chain is present."""
        return hashes[-HASH_BYTES:] in self._ends or self._match(hashes) == len(hashes)

    def last(self, chain: Chain, limit: int) -> int:
        """Blocks of the chain, from its start and at most `limit`, that are present."""
        return min(limit, self._match(chain.hashes) // HASH_BYTES)

    def store(self, event: KVEvent) -> bool:
        hashes = event.hashes
        if event.tier != (self.tier or event.tier) or not (event.parent or event.tier == DEVICE):
            return False
        run, at = self._find(event.parent)
        if run is None:
            return False
        self.tier = event.tier
        done, size = 0, len(hashes)
        while done < size:
            if at < len(run.hashes):
                same = _common(hashes, done, run.hashes, at)
                done, at = done + same, at + same
                if done < size and at < len(run.hashes):
                    run = self._split(run, at)
                continue
            child = run.children.get(hashes[done : done + HASH_BYTES])
            if child is None:
                return self._add(run, hashes[done:])
            run, at = child, 0
        return True

    def remove(self, hashes: bytes, tier: str) -> bool:
        if tier != self.tier or not hashes:
            return True  # nothing of it is here
        run = self._ends.get(hashes[-HASH_BYTES:])
        if run is None or run.children:
            return False
        if run.hashes.endswith(hashes):
            self._cut(run, len(hashes))
            return True
        whole, left = [], len(hashes)  # it may end several runs, one behind the other
        while run.parent is not None and hashes.endswith(run.hashes, 0, left):
            whole.append(run)
            left -= len(run.hashes)
            run = run.parent
            if not left or len(run.children) > 1:
                break
        if left and (len(run.children) > 1 or not run.hashes.endswith(hashes[:left])):
            return False
        for end in whole:
            self._cut(end, len(end.hashes))
        if left:
            self._cut(run, left)
        return True

    def clear(self, tier: str) -> None:
        if tier == self.tier:
            self._root = Run(None, b"")
            self._ends, self._forks = {}, {}

    def events(self) -> list[KVEvent]:
        """What leads to all this, parents first."""
        out = []
        todo = list(self._root.children.values())
        while todo:
            run = todo.pop()
            parent = run.parent.hashes[-HASH_BYTES:] if run.parent else b""
            out.append(KVEvent("stored", 0, bytes(parent), bytes(run.hashes), self.tier))
            todo.extend(run.children.values())
        return out

    def _match(self, hashes: bytes) -> int:
        """Bytes of the chain that are present."""
        run, at = self._root, 0
        while child := run.children.get(hashes[at : at + HASH_BYTES]):
            if not hashes.startswith(child.hashes, at):
                same = _common(hashes, at, child.hashes, 0)
                if len(self._forks) == MAX_FORKS:
                    self._forks.clear()
                self._forks[hashes[at + same - HASH_BYTES : at + same]] = child
                return at + same
            run, at = child, at + len(child.hashes)
        return at

    def _find(self, block: bytes) -> tuple[Run | None, int]:
        """The run that holds a block, and where the block ends there."""
        if not block:
            return self._root, 0
        run = self._ends.get(block)
        if run is not None:
            return run, len(run.hashes)
        run = self._forks.get(block)
        while run is not None:  # a split leaves the end of a run in it: the rest has moved up
            if at := _end_of(block, run.hashes):
                return run, at
            run = run.parent
        for run in self._ends.values():
            if at := _end_of(block, run.hashes):
                return run, at
        return None, 0

    def _add(self, run: Run, hashes: bytes) -> bool:
        end = hashes[-HASH_BYTES:]
        if end in self._ends:
            return False  # a block with two parents
        if run.parent is None or run.children:
            run.children[hashes[:HASH_BYTES]] = run = Run(run, hashes)
        else:
            del self._ends[bytes(run.hashes[-HASH_BYTES:])]
            run.hashes += hashes
        self._ends[end] = run
        return True

    def _cut(self, run: Run, size: int) -> None:
        del self._ends[bytes(run.hashes[-HASH_BYTES:])]
        first = bytes(run.hashes[:HASH_BYTES])
        del run.hashes[-size:]
        if run.hashes:
            self._ends[bytes(run.hashes[-HASH_BYTES:])] = run
        elif run.parent is not None:
            del run.parent.children[first]

    def _split(self, run: Run, at: int) -> Run:
        """The head of a run, up to `at`, as a run of its own."""
        parent = run.parent
        assert parent is not None
        head = Run(parent, run.hashes[:at])
        parent.children[bytes(head.hashes[:HASH_BYTES])] = head
        del run.hashes[:at]
        run.parent = head
        head.children[bytes(run.hashes[:HASH_BYTES])] = run
        self._ends[bytes(head.hashes[-HASH_BYTES:])] = head
        return head


def _common(a: bytes, a_at: int, b: bytearray, b_at: int) -> int:
    """Bytes of the blocks that both have from there on. Where one block is equal, so are those before it."""
    low, high = 0, min(len(a) - a_at, len(b) - b_at) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        x, y = a_at + HASH_BYTES * (middle - 1), b_at + HASH_BYTES * (middle - 1)
        if a[x : x + HASH_BYTES] == b[y : y + HASH_BYTES]:
            low = middle
        else:
            high = middle - 1
    return HASH_BYTES * low


def _end_of(block: bytes, hashes: bytearray) -> int:
    """Where it ends in there; 0: nowhere."""
    at = hashes.find(block)
    while at % HASH_BYTES and at >= 0:
        at = hashes.find(block, at + 1)
    return at + HASH_BYTES if at >= 0 else 0
