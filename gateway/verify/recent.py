"""`Recent`: names of blocks that were told of lately."""

from __future__ import annotations

from collections import deque

LIMIT = 512 << 10  # bytes


class Recent:
    """Packed names with the time at which they came; the oldest go."""

    __slots__ = ("_bytes", "_items", "_limit", "_whole")

    def __init__(self, limit: int = LIMIT) -> None:
        self._items: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._limit = limit
        self._whole = float("-inf")  # all that came after it is here

    def add(self, now: float, names: bytes) -> None:
        self._items.append((now, names))
        self._bytes += len(names) + 64
        while self._bytes > self._limit:
            self._whole, old = self._items.popleft()
            self._bytes -= len(old) + 64

    def since(self, time: float, *names: bytes) -> bool:
        """Whether one of these came at `time` or later, or may have."""
        if time <= self._whole:
            return True
        for came, told in reversed(self._items):
            if came < time:
                return False
            if any(name in told for name in names):
                return True
        return False

    def told(self, since: float = float("-inf")) -> list[bytes]:
        """What came at `since` or later and is still here, the newest last."""
        return [names for time, names in self._items if time >= since]
