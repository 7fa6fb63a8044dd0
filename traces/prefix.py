"""A radix tree over runs: the longest prefix that earlier content shares, as an infinite cache has it."""

from __future__ import annotations

from bien.core.request import BlockRuns

_FOREVER = float("inf")


class _Node:
    __slots__ = ("children", "length", "start", "time")

    def __init__(self, start: int, length: int, time: float) -> None:
        self.start = start
        self.length = length
        self.time = time  # when it was there first
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """Costs a step per run, not per token. Times may be left out where order is enough."""

    def __init__(self) -> None:
        self._root = _Node(0, 0, -_FOREVER)

    def match(self, content: BlockRuns, before: float = _FOREVER) -> int:
        """Tokens of the longest prefix inserted at or before `before`."""
        node, matched = self._root, 0
        for start, n in content.runs():
            while n:
                child = node.children.get(start)
                if child is None or child.time > before:
                    return matched
                take = min(n, child.length)
                matched += take
                if take < child.length:
                    return matched
                node, start, n = child, start + take, n - take
        return matched

    def insert(self, content: BlockRuns, time: float = 0.0, behind: _Node | None = None) -> _Node:
        """Remember all prefixes of `content` as there from `time` on. Returns where it ends: content
        may be inserted `behind` it, until something else has been."""
        node = behind or self._root
        for start, n in content.runs():
            while n:
                child = node.children.get(start)
                if child is None:
                    child = node.children[start] = _Node(start, n, time)
                elif n < child.length:
                    child = self._split(node, child, n)
                if time < child.time:
                    child.time = time
                node, start, n = child, start + child.length, n - child.length
        return node

    def clone(self) -> PrefixTree:
        """A tree of its own with the same content."""
        other = PrefixTree()
        todo = [(self._root, other._root)]
        while todo:
            node, copy = todo.pop()
            for start, child in node.children.items():
                copy.children[start] = twin = _Node(child.start, child.length, child.time)
                todo.append((child, twin))
        return other

    def _split(self, parent: _Node, child: _Node, at: int) -> _Node:
        upper = _Node(child.start, at, child.time)
        parent.children[child.start] = upper
        child.start += at
        child.length -= at
        upper.children[child.start] = child
        return upper
