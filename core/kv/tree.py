"""`PrefixTree`: what is cached, as a radix tree over chained block hashes.

          root
           |            a node is a run of blocks: packed hashes, and one row of block ids per group
     [h0 h1 h2 h3]      (-1: this group has no block there)
       /       \\
  [h4 h5]     [g4]      leaves lose blocks from their tails

There are no node locks: a block may be evicted exactly when it is cached and nobody refers to it. A
sequence refers to the blocks of all anchored groups on its whole path (anchored: every kind but WINDOW and
STATE), so an idle anchored block has no referenced block below it, and tails can always be cut.
Radix trees for prefix caching: SGLang (arXiv:2312.07104); group-wise eviction as in vLLM's hybrid manager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.log import ChangeLog
from bien.core.kv.pool import I32, BlockPool
from bien.core.kv.prefix import anchored
from bien.core.kv.recency import Recency

Index = NDArray[np.intp]
TAILS = -1  # the lane of leaves, used by all anchored groups together; lane g is that of group g


class Node:
    """A run of `size` blocks that starts `start` blocks below the root. Written by the tree only."""

    __slots__ = (
        "blocks",
        "children",
        "dead",
        "entry",
        "hashes",
        "key",
        "parent",
        "rank",
        "size",
        "start",
        "used",
    )

    def __init__(
        self, parent: Node | None, start: int, hashes: bytes, blocks: I32, used: list[int], rank: list[int]
    ) -> None:
        self.parent = parent  # None: the root
        self.dead = False  # it left the tree; `parent` still leads to what is left above it
        self.start = start
        self.key = hashes[:HASH_BYTES]
        self.hashes = bytearray(hashes)
        self.size = len(hashes) // HASH_BYTES
        self.blocks = blocks  # [groups, capacity >= size], -1: absent
        self.children: dict[bytes, Node] = {}
        # Per lane (groups, then TAILS): tick of last use, rank, and the key it is queued under.
        self.used = used
        self.rank = rank
        self.entry: list[tuple[int, int] | None] = [None] * len(used)

    @property
    def end(self) -> int:
        return self.start + self.size

    def slice(self, lo: int, hi: int) -> bytes:
        """Hashes of blocks lo..hi of the node."""
        return bytes(self.hashes[lo * HASH_BYTES : hi * HASH_BYTES])

    def hash_before(self, lo: int) -> bytes:
        """The hash that block `lo` of the node is chained to; b"" at the start of a chain."""
        if lo:
            return self.slice(lo - 1, lo)
        parent = self.parent
        return parent.slice(parent.size - 1, parent.size) if parent is not None else b""


Path = list[tuple[Node, int]]  # nodes from the root's child on, with how many of their blocks match
Span = tuple[Node, int, int, bool]  # a node, blocks lo..hi of it, and whether they are new


class PrefixTree:
    """Matches, inserts and evicts; emits an event for every block that appears or vanishes."""

    def __init__(self, groups: Sequence[KVGroup], pools: list[BlockPool], log: ChangeLog) -> None:
        self.pools = pools
        self.log = log
        self.anchors = [g for g, group in enumerate(groups) if anchored(group)]
        self.others = [g for g, group in enumerate(groups) if not anchored(group)]
        lanes = len(groups) + 1
        self.root = Node(None, 0, b"", np.zeros((len(groups), 0), np.int32), [0] * lanes, [1] * lanes)
        self.version = 0  # grows whenever an old path may no longer say what is present
        self.tick = 0
        self.tails = Recency(TAILS)
        self.lanes = {g: Recency(g) for g in self.others}
        # How many of a node's deepest entries are worth as much as the node: a window, or one snapshot.
        self._keep = {
            g: (-(-groups[g].window // groups[g].block_tokens) or 1 << 30)
            if groups[g].kind is GroupKind.WINDOW
            else 1
            for g in self.others
        }

    def match(self, hashes: bytes) -> Path:
        """The path of the longest stored prefix of a chain. Costs one comparison of memory per node."""
        path: Path = []
        node, at, total = self.root, 0, len(hashes)
        while at < total:
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            if len(child.hashes) <= total - at and hashes.startswith(child.hashes, at):
                n = child.size
            else:
                n = _common(hashes, at, child.hashes)
            path.append((child, n))
            if n < child.size:
                break
            at += n * HASH_BYTES
            node = child
        return path

    def locate(self, node: Node, depth: int) -> Node:
        """The node that holds block depth - 1, given one that held it: a split leaves the tail of a run in
        its node, so that the way is up, even from a node that has been evicted since."""
        while node.start >= depth and node.parent is not None:
            node = node.parent
        return node

    def touch(self, node: Node, lows: Sequence[int]) -> None:
        """A sequence used the path that ends in `node`; group g used it from block lows[g] on."""
        self.tick += 1
        tick, at = self.tick, node
        while at.parent is not None:
            at.used[TAILS] = tick
            for g in self.others:
                if at.start + at.size > lows[g]:
                    at.used[g] = tick
            at = at.parent

    def insert(self, node: Node, at: int, hashes: bytes, stop: int) -> list[Span]:
        """Make the path for blocks at..stop of a chain exist; `node` holds block at - 1 (the root for 0).

        Returns its spans in order. New positions are -1 in every group: the caller must `install`, in every
        anchored group.
        """
        spans: list[Span] = []
        used = self.tick = self.tick + 1
        while at < stop:
            lo = at - node.start
            if lo < node.size:
                n = _common(hashes, at * HASH_BYTES, node.hashes, lo * HASH_BYTES, stop - at)
                if n:
                    spans.append((node, lo, lo + n, False))
                    at += n
                if at < stop and lo + n < node.size:
                    node = self._split(node, lo + n)
                    if n:
                        spans[-1] = (node, lo, lo + n, False)
                continue
            child = node.children.get(hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            if child is not None:
                node = child
                node.used[TAILS] = used
                continue
            rest = hashes[at * HASH_BYTES : stop * HASH_BYTES]
            if node.children or node.parent is None:
                node = self._add(node, rest)
            else:
                _append(node, rest)
            spans.append((node, at - node.start, stop - node.start, True))
            at = stop
        node.used[TAILS] = used
        if node.parent is not None and not node.children:
            self.tails.offer(node)
        return spans

    def install(self, group: int, node: Node, lo: int, blocks: I32) -> None:
        """Put referenced blocks where the group has none, from block `lo` of the node on."""
        hi = lo + len(blocks)
        self.version += 1
        node.blocks[group, lo:hi] = blocks
        self.pools[group].cache(blocks)
        self.log.stored(group, node.hash_before(lo), node.slice(lo, hi), blocks)
        if group in self.lanes:
            present = int(np.count_nonzero(node.blocks[group, : node.size] >= 0))
            node.rank[group] = 0 if present > self._keep[group] else 1
            node.used[group] = self.tick
            self.lanes[group].offer(node)

    def discard(self, group: int, node: Node, index: int) -> None:
        """Remove one block of a WINDOW or STATE group."""
        self._drop(group, node, np.array([index]))
        self.prune(node)

    def evict(self, group: int, free: int) -> None:
        """Evict idle blocks, least recently used first, until the pool has `free` free ones. The caller
        has seen that `available` suffices."""
        if group in self.lanes:
            self._evict_entries(group, free)
        else:
            self._evict_tails(group, free)
        assert self.pools[group].free >= free, "idle blocks that cannot be evicted"

    def prune(self, node: Node) -> None:
        """Without anchored groups: cut tails that hold nothing at all."""
        while not self.anchors and node.parent is not None and not node.children:
            held = np.flatnonzero((node.blocks[:, : node.size] >= 0).any(axis=0))
            kept = int(held[-1]) + 1 if len(held) else 0
            if kept == node.size:
                return
            parent = node.parent
            self._cut(node, node.size - kept)
            node = parent

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def _add(self, parent: Node, hashes: bytes) -> Node:
        blocks = np.full((len(self.pools), len(hashes) // HASH_BYTES), -1, np.int32)
        lanes = len(self.pools) + 1
        node = Node(parent, parent.end, hashes, blocks, [self.tick] * lanes, [1] * lanes)
        parent.children[node.key] = node
        return node

    def _split(self, node: Node, k: int) -> Node:
        # The head is new and becomes the parent: who knows a place in the node finds it by going up.
        parent = node.parent
        assert parent is not None
        head = Node(
            parent, node.start, node.slice(0, k), node.blocks[:, :k].copy(), node.used[:], node.rank[:]
        )
        parent.children[head.key] = head
        del node.hashes[: k * HASH_BYTES]
        node.blocks = node.blocks[:, k : node.size].copy()
        node.start += k
        node.size -= k
        node.key = node.slice(0, 1)
        node.parent = head
        head.children[node.key] = node
        for lane in self.lanes.values():
            lane.offer(head)
        self.version += 1
        return head

    def _evict_tails(self, group: int, free: int) -> None:
        pool = self.pools[group]
        held: list[Node] = []
        while pool.free < free:
            node = self.tails.first()
            if node is None:
                break
            n = 0 if node.children else self._loose(node, min(free - pool.free, node.size))
            if n:
                self._cut(node, n)  # it keeps its place, until there is nothing left of it
                continue
            self.tails.pop()
            if not node.children:
                held.append(node)
        for node in held:
            self.tails.offer(node)

    def _loose(self, node: Node, n: int) -> int:
        # How many of the last n blocks no sequence holds. Pins alone do not keep a block in the tree:
        # it leaves under its transfer and is free when that ends. So idle blocks above it stay evictable.
        for g in self.anchors:
            ids = node.blocks[g, node.size - n : node.size]
            pool = self.pools[g]
            refs = pool.refs[ids]
            if not np.count_nonzero(refs):
                continue
            held = (refs - pool.pins[ids]).nonzero()[0]
            if len(held):
                n -= int(held[-1]) + 1
            if not n:
                break
        return n

    def _evict_entries(self, group: int, free: int) -> None:
        # Spare entries first (rank 0: behind the deepest window or snapshot of their node), from the head
        # on: what lies deepest serves the next turn.
        pool, lane = self.pools[group], self.lanes[group]
        held: list[Node] = []
        while pool.free < free:
            node = lane.pop()
            if node is None:
                break
            entries = (node.blocks[group, : node.size] >= 0).nonzero()[0]
            if not node.rank[group]:
                entries = entries[: max(0, len(entries) - self._keep[group])]
            idle = entries[pool.refs[node.blocks[group, entries]] == 0]
            gone = idle[: free - pool.free]
            if len(gone):
                self._drop(group, node, gone)
            if not node.rank[group]:
                if len(gone) == len(idle):
                    node.rank[group] = 1
                lane.offer(node)
            elif len(gone) < len(entries):
                held.append(node)
            self.prune(node)
        for node in held:
            lane.offer(node)

    def _drop(self, group: int, node: Node, at: Index) -> None:
        ids = node.blocks[group, at]
        node.blocks[group, at] = -1
        self.version += 1
        self._removed(group, node, at)
        self.pools[group].uncache(ids)

    def _cut(self, node: Node, n: int) -> None:
        # Drop the last n blocks of a leaf, of all groups.
        size, gone = node.size - n, None
        self.version += 1
        for g, pool in enumerate(self.pools):
            ids = node.blocks[g, size : node.size]
            if g in self.lanes:
                at = (ids >= 0).nonzero()[0]
                if len(at):
                    self._removed(g, node, at + size)
                    pool.uncache(ids[at])
            else:  # anchored: all of it is there
                gone = gone or node.slice(size, node.size)
                self.log.removed(g, gone)
                pool.uncache(ids)
        node.blocks[:, size : node.size] = -1
        del node.hashes[size * HASH_BYTES :]
        node.size = size
        parent = node.parent
        if not size and parent is not None:
            del parent.children[node.key]
            node.dead = True
            if parent.parent is not None and not parent.children:
                self.tails.offer(parent)

    def _removed(self, group: int, node: Node, at: Index) -> None:
        for lo, hi in runs(at):
            self.log.removed(group, node.slice(lo, hi))


def runs(at: Index) -> list[tuple[int, int]]:
    """Ascending indices as (start, stop) of contiguous runs; none for no index."""
    if not len(at):
        return []
    first, last = int(at[0]), int(at[-1])
    if last - first + 1 == len(at):
        return [(first, last + 1)]
    breaks = np.flatnonzero(np.diff(at) != 1) + 1
    starts = [first, *at[breaks].tolist()]
    stops = [*(at[breaks - 1] + 1).tolist(), last + 1]
    return list(zip(starts, stops, strict=True))


def _common(a: bytes, a_at: int, b: bytearray, b_at: int = 0, most: int = 1 << 60) -> int:
    # Equal leading blocks of two packed chains.
    n = min((len(a) - a_at) // HASH_BYTES, (len(b) - b_at) // HASH_BYTES, most)
    if n < 2:
        return int(n > 0) and int(a[a_at : a_at + HASH_BYTES] == b[b_at : b_at + HASH_BYTES])
    unequal = np.frombuffer(a, "<u8", 2 * n, a_at) != np.frombuffer(b, "<u8", 2 * n, b_at)
    at = int(unequal.argmax())
    return at // 2 if unequal[at] else n


def _append(node: Node, hashes: bytes) -> None:
    size = node.size + len(hashes) // HASH_BYTES
    if size > node.blocks.shape[1]:
        blocks = np.full((len(node.blocks), max(size, 2 * node.size)), -1, np.int32)
        blocks[:, : node.size] = node.blocks[:, : node.size]
        node.blocks = blocks
    node.hashes += hashes
    node.size = size
