"""`Recency`: least recently used order over tree nodes, as a heap with lazy entries."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bien.core.kv.tree import Node

Key = tuple[int, int]  # (rank, tick)


class Recency:
    """One order ("lane"). A node's key is (rank, used): rank 0 is spare content and goes first.

    Keys that grow cost nothing: the entry is corrected when it comes up. A key that shrinks must be
    offered again; the older entry is then stale and skipped.
    """

    __slots__ = ("_heap", "_serial", "lane")

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self._heap: list[tuple[Key, int, Node]] = []
        self._serial = 0  # nodes do not compare

    def offer(self, node: Node) -> None:
        """Let the node come up at its present key."""
        lane = self.lane
        key = (node.rank[lane], node.used[lane])
        entry = node.entry[lane]
        if entry is None or key < entry:
            node.entry[lane] = key
            self._serial += 1
            heapq.heappush(self._heap, (key, self._serial, node))

    def first(self) -> Node | None:
        """The first live node, which keeps its place. None: empty."""
        lane, heap = self.lane, self._heap
        while heap:
            key, _, node = heap[0]
            if node.entry[lane] == key:
                if not node.dead and node.rank[lane] == key[0] and node.used[lane] == key[1]:
                    return node
                node.entry[lane] = None
                heapq.heappop(heap)
                if not node.dead:
                    self.offer(node)
            else:
                heapq.heappop(heap)
        return None

    def pop(self) -> Node | None:
        """The first live node; it is out of the order until offered again. None: empty."""
        node = self.first()
        if node is not None:
            heapq.heappop(self._heap)
            node.entry[self.lane] = None
        return node
