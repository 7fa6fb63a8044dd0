"""A prompt's chain of block hashes, as an index looks at it."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

from bien.core.api import HASH_BYTES

DEVICE = "device"  # the tier that engines compute in
_BLOCK = struct.Struct(f"{HASH_BYTES}s")


def split(hashes: bytes) -> Iterator[bytes]:
    return itertools.chain.from_iterable(_BLOCK.iter_unpack(hashes))


class Chain:
    """A prompt's hashes, and where each stands (built only for groups that need it)."""

    def __init__(self, hashes: bytes) -> None:
        self.hashes = hashes
        self.blocks = len(hashes) // HASH_BYTES
        self._positions: dict[bytes, int] | None = None

    def at(self, block: int) -> bytes:
        return self.hashes[HASH_BYTES * block : HASH_BYTES * block + HASH_BYTES]

    @property
    def positions(self) -> dict[bytes, int]:
        """Hash -> number of blocks up to and with it."""
        if self._positions is None:
            self._positions = dict(zip(split(self.hashes), itertools.count(1), strict=False))
        return self._positions
