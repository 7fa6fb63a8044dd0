"""What differs and is nobody's fault: the cache changed between the router's look and the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bien.core.kv.hashing import HASH_BYTES
from bien.gateway.verify.tap import CLEARED, Tap

if TYPE_CHECKING:
    from bien.gateway.stream import Stream


def excuse(stream: Stream, tap: Tap, block: int) -> str:
    """Why `stream.claimed` and `stream.cached` differ, "" for no good reason.

    evicted: blocks went while the request waited, and events said so.
    in flight: they were expected of another prompt that was not computed yet.
    stored: they came while the request waited, and events said so.
    """
    hashes, placed = stream.route.hashes, stream.placed
    low, high = sorted((stream.claimed // block, stream.cached // block))
    first, last = _name(hashes, low), _name(hashes, high - 1)
    if stream.claimed < stream.cached:
        return "stored" if first and tap.stored.since(placed, first, last or first) else ""
    if not first:
        return ""
    if tap.removed.since(placed, first, last or first, CLEARED):
        return "evicted"
    if tap.started.since(placed, first):
        return "in flight"
    at = low * HASH_BYTES
    for other in stream.member.streams.values() if stream.member is not None else ():
        waiting = other is not stream and other.first < 0
        if waiting and other.placed <= placed and other.route.hashes[at : at + HASH_BYTES] == first:
            return "in flight"
    return ""


def _name(hashes: bytes, block: int) -> bytes:
    return hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
