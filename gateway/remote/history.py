"""`History`: what an engine without KV events may have cached, by what was sent there.

A guess: blocks count for a time, and while there is room by the engine's own capacity; the least recently
used go first, and of one prompt its end.
"""

from __future__ import annotations

from collections import OrderedDict

from bien.core.kv.events import KVEvent
from bien.core.kv.hashing import HASH_BYTES


class History:
    def __init__(self, seconds: float, blocks: int = 0) -> None:
        """`seconds` that a block counts after its last use; `blocks` at most (0: any number)."""
        self.seconds = seconds
        self.blocks = blocks
        self._held: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()  # block -> the one before, expiry

    def used(self, hashes: bytes, now: float) -> list[KVEvent]:
        """A chain was computed there, or found. What it changes."""
        names = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
        fresh = [name for name in names if name not in self._held]
        parents = [b"", *names[:-1]] if names else []
        for name, parent in zip(reversed(names), reversed(parents), strict=True):
            self._held[name] = parent, now + self.seconds
            self._held.move_to_end(name)
        out = []
        # A block may have gone before those behind it did: each run has the parent of its first.
        start = 0
        while start < len(fresh):
            end = start + 1
            while end < len(fresh) and self._held[fresh[end]][0] == fresh[end - 1]:
                end += 1
            out.append(KVEvent("stored", 0, self._held[fresh[start]][0], b"".join(fresh[start:end])))
            start = end
        return out + self.expire(now)

    def expire(self, now: float) -> list[KVEvent]:
        """What counts no longer."""
        gone = []
        while self._held:
            name, (_, expiry) = next(iter(self._held.items()))
            if expiry > now and not (self.blocks and len(self._held) > self.blocks):
                break
            del self._held[name]
            gone.append(name)
        return [KVEvent("removed", 0, b"", b"".join(gone))] if gone else []

    def snapshot(self) -> list[KVEvent]:
        return [KVEvent("stored", 0, parent, name) for name, (parent, _) in reversed(self._held.items())]
