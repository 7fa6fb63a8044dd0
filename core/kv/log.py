"""`ChangeLog`: what became cached and what ceased to be, for the index and for KV stores."""

from __future__ import annotations

import numpy as np

from bien.core.kv.events import KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.pool import I32, BlockPool


class ChangeLog:
    """Written by the tree and the cache, drained by the engine."""

    __slots__ = ("_committed", "_events", "_limit", "_pending", "_pools", "saved")

    def __init__(self, pools: list[BlockPool]) -> None:
        self._pools = pools
        self.saved = True  # whether anyone asks for `take_committed`; written by the engine's tier
        self._events: list[KVEvent] = []
        # (group, hashes, blocks, births): births tell whether a block still holds what it held.
        self._committed: list[tuple[int, bytes, I32, I32]] = []
        self._pending = 0
        self._limit = 2 * sum(pool.size for pool in pools)

    def stored(self, group: int, parent: bytes, hashes: bytes, blocks: I32) -> None:
        self._events.append(KVEvent("stored", group, parent, hashes))
        if not self.saved:
            return
        self._committed.append((group, hashes, blocks, self._pools[group].births[blocks]))
        self._pending += len(blocks)
        if self._pending > self._limit:  # an engine without a store never asks, and must not leak
            self._forget_evicted()

    def removed(self, group: int, hashes: bytes) -> None:
        self._events.append(KVEvent("removed", group, b"", hashes))

    def take_events(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def take_committed(self) -> list[tuple[int, bytes, list[int]]]:
        """Runs whose blocks still hold what they were stored as; what was evicted since is left out."""
        self._forget_evicted()
        out = [(group, hashes, blocks.tolist()) for group, hashes, blocks, _ in self._committed]
        self._committed = []
        self._pending = 0
        return out

    def _forget_evicted(self) -> None:
        runs, self._committed = self._committed, []
        self._pending = 0
        for group, hashes, blocks, births in runs:
            pool = self._pools[group]
            alive = np.flatnonzero(pool.cached[blocks] & (pool.births[blocks] == births))
            if len(alive) < len(blocks):
                names = (hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in alive.tolist())
                hashes, blocks, births = b"".join(names), blocks[alive], births[alive]
            if len(blocks):
                self._committed.append((group, hashes, blocks, births))
                self._pending += len(blocks)
