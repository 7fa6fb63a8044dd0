"""Chains of block hashes and KV groups for the tests of the KV plane."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from bien.core.kv.groups import GroupKind, KVGroup

BT = 4
FULL = KVGroup("full", GroupKind.FULL, (0,), BT, bytes_per_token=8)
DRAFT = KVGroup("draft", GroupKind.DRAFT, (9,), BT, bytes_per_token=8)
WINDOW = KVGroup("window", GroupKind.WINDOW, (1,), BT, bytes_per_token=8, window=6)
STATE = KVGroup("state", GroupKind.STATE, (2,), BT, constant_bytes=64)


def chain(words: Iterable[int]) -> bytes:
    """A hash per word, each over everything before it."""
    out, parent = [], b""
    for word in words:
        parent = hashlib.blake2b(parent + word.to_bytes(4, "little"), digest_size=16).digest()
        out.append(parent)
    return b"".join(out)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 16] for i in range(0, len(hashes), 16)]
