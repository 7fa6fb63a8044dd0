"""Virtual token ids become token ids: the same (seed, scope, id) always gives the same token."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from bien.core.errors import UserError
from bien.core.request import BlockRuns, TokenIds

_PAIR = struct.Struct("<qq")  # a run, as BlockRuns packs it


class Materializer:
    """Fills content with tokens from the middle of a vocabulary.

    Special tokens sit at its start or its end, so the first 1/32 and the last 1/8 are left out.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.low = vocab_size // 32
        self.high = vocab_size - vocab_size // 8
        self._seed = seed
        if self.high - self.low < 2:
            raise UserError(f"a vocabulary of {vocab_size} tokens cannot stand for content; valid: 2 or more")

    def tokens(self, content: BlockRuns, scope: str) -> TokenIds:
        """`content` as token ids, uint32 packed."""
        ids = virtual_ids(content).view(np.uint64)
        name = hashlib.blake2b(f"{self._seed}\0{scope}".encode(), digest_size=8).digest()
        mixed = _mix(ids + np.uint64(int.from_bytes(name, "little")))
        span = np.uint64(self.high - self.low)
        tokens = ((mixed >> np.uint64(32)) * span >> np.uint64(32)) + np.uint64(self.low)
        return TokenIds(tokens.astype("<u4").tobytes())


def virtual_ids(content: BlockRuns) -> NDArray[np.int64]:
    """Every virtual token id, one after the other."""
    flat = np.frombuffer(content.packed, np.int64)
    starts, lengths = flat[::2], flat[1::2]
    before = np.cumsum(lengths) - lengths
    ids: NDArray[np.int64] = np.arange(len(content), dtype=np.int64) + np.repeat(starts - before, lengths)
    return ids


def scoped(content: BlockRuns, scope: str) -> BlockRuns:
    """Content that differs from equal content of every other scope from its first token on, for engines
    that hash virtual ids."""
    if not content:
        return content
    start, n = _PAIR.unpack_from(content.packed)
    name = hashlib.blake2b(f"{scope}\0{start}".encode(), digest_size=8).digest()
    first = BlockRuns(_PAIR.pack(int.from_bytes(name, "little") >> 2 | 1 << 62, 1), 1)
    if n == 1:
        return first.join(BlockRuns(content.packed[16:], content.length - 1))
    rest = _PAIR.pack(start + 1, n - 1) + content.packed[16:]
    return first.join(BlockRuns(rest, content.length - 1))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
