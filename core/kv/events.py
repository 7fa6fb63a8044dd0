"""KV events: every change of the cached blocks, in order, for the index."""

from __future__ import annotations

import msgspec


class KVEvent(msgspec.Struct, array_like=True, gc=False):
    """`op` is "stored", "removed" or "cleared".

    stored: `hashes` (16 bytes each, chain order) follow `parent` (b"" at the root of a chain).
    removed: `hashes` are gone from `tier`; `parent` is unused. One event covers a run of blocks.
    """

    op: str
    group: int = 0
    parent: bytes = b""
    hashes: bytes = b""
    tier: str = "device"


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one engine step changed. `seq` grows by one per batch inside a `generation`
    (boot id + epoch); a gap or another generation means: ask for a snapshot."""

    worker: str
    dp_rank: int
    generation: str
    seq: int
    events: list[KVEvent] = []
