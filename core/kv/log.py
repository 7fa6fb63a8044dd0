"""`ChangeLog`: what became cached and what ceased to be, for the index and for KV stores."""

from __future__ import annotations

from collections import deque

from bien.core.kv.events import KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.pool import I32, BlockPool


class ChangeLog:
    """Written by the tree and the cache, drained by the engine."""

    __slots__ = ("_committed", "_events", "_limit", "_pending", "_pools")

    def __init__(self, pools: list[BlockPool]) -> None:
        self._pools = pools
        self._events: list[KVEvent] = []
        # (group, hashes, blocks, births): births tell whether a block still holds what it held.
        self._committed: deque[tuple[int, bytes, I32, I32]] = deque()
        self._pending = 0
        # More can never be alive at a time, so an engine without a store, which never asks, leaks nothing.
        self._limit = sum(pool.size for pool in pools)

    def stored(self, group: int, parent: bytes, hashes: bytes, blocks: I32) -> None:
        self._events.append(KVEvent("stored", group, parent, hashes))
        self._committed.append((group, hashes, blocks, self._pools[group].births[blocks]))
        self._pending += len(blocks)
        while self._pending > self._limit:
            self._pending -= len(self._committed.popleft()[2])

    def removed(self, group: int, hashes: bytes) -> None:
        self._events.append(KVEvent("removed", group, b"", hashes))

    def take_events(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def take_committed(self) -> list[tuple[int, bytes, list[int]]]:
        """Runs whose blocks still hold what they were stored as; what was evicted since is left out."""
        out: list[tuple[int, bytes, list[int]]] = []
        for group, hashes, blocks, births in self._committed:
            pool = self._pools[group]
            alive = pool.cached[blocks] & (pool.births[blocks] == births)
            if not alive.all():
                keep = alive.nonzero()[0].tolist()
                hashes = b"".join(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in keep)
                blocks = blocks[alive]
            if len(blocks):
                out.append((group, hashes, blocks.tolist()))
        self._committed.clear()
        self._pending = 0
        return out
