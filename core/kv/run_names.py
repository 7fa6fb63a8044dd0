"""Names of the blocks of opaque runs: a rolling hash of all of them at once, for simulations.

Two lanes of 64 bits each. A block's content is mixed to c (splitmix64 of its first virtual id where one run
covers it, a digest of its pieces elsewhere); its name follows from its parent's:

    h[i] = h[i-1] * M + c[i]      (mod 2^64, M odd)
         = M^i * (h[0] + c[1] M^-1 + ... + c[i] M^-i)

so that a chain needs sums and products of arrays only, and goes on from its last name. Who may choose the
content can make two names equal; a trace does not. The tenant is in h[0], its root.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.request import BlockRuns

U64 = NDArray[np.uint64]
_MASK = (1 << 64) - 1
_LANES = (0xD1342543DE82EF95, 0xAF251AF3B0F025B5)  # multipliers of good spectra (Steele, Vigna 2021)
_SALTS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_PAIR = struct.Struct("<QQ")
_FEW = 6  # blocks up to which single numbers are faster than arrays

_SALTED = np.array(_SALTS, np.uint64)[:, None]
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_powers: list[U64] = []  # M^i, then M^-i, i = 1, 2, ..., a row per lane


def name_runs(parent: bytes, runs: BlockRuns, start: int, stop: int, size: int) -> bytes:
    """Names of the blocks of `size` tokens from `start` to `stop` of `runs`, whose first follows the block
    named `parent`; 16 bytes each."""
    count = (stop - start) // size
    flat: NDArray[np.int64] = np.frombuffer(runs.packed, np.int64)
    if count <= _FEW and len(flat) <= 2 * _FEW:
        return _one_by_one(parent, flat.tolist(), start, count, size)
    lengths = flat[1::2]
    ends = np.cumsum(lengths)
    at = np.arange(start, stop, size)
    run = ends.searchsorted(at, side="right")  # that holds a block's first token
    left = ends[run] - at
    first = (flat[::2] + lengths - ends)[run] + at
    contents = _mixed(first.view(np.uint64))
    for i in (left < size).nonzero()[0].tolist():
        contents[:, i] = _pieces(flat, int(run[i]), int(first[i]), int(left[i]), size)
    up, down = _powers_to(count)
    contents *= down[:, :count]
    sums = contents.cumsum(axis=1)
    sums += np.frombuffer(parent, np.uint64)[:, None]
    sums *= up[:, :count]
    return sums.T.tobytes()


def _one_by_one(parent: bytes, flat: list[int], start: int, count: int, size: int) -> bytes:
    a, b = _PAIR.unpack(parent)
    out = []
    i, left = 0, flat[1] - start if flat else 0
    for _ in range(count):
        while left <= 0:
            i += 2
            left += flat[i + 1]
        first = flat[i] + flat[i + 1] - left
        if left >= size:
            c, d = _mixed_one(first, _SALTS[0]), _mixed_one(first, _SALTS[1])
        else:
            c, d = _pieces(flat, i // 2, first, left, size)
        a, b = (a * _LANES[0] + c) & _MASK, (b * _LANES[1] + d) & _MASK
        out.append(_PAIR.pack(a, b))
        left -= size
    return b"".join(out)


def _pieces(flat: Any, run: int, first: int, left: int, size: int) -> tuple[int, int]:
    """The content of a block that begins `left` tokens before the end of a run and goes on in others."""
    pieces, missing = [(first, left)], size - left
    while missing > 0:
        run += 1
        n = min(missing, int(flat[2 * run + 1]))
        pieces.append((int(flat[2 * run]), n))
        missing -= n
    digest = hashlib.blake2b(BlockRuns.of(pieces).packed, digest_size=16).digest()
    a, b = _PAIR.unpack(digest)
    return a, b


def _powers_to(count: int) -> tuple[U64, U64]:
    if not _powers or _powers[0].shape[1] < count:
        room = max(1024, 2 * count)
        inverse = [pow(lane, -1, 1 << 64) for lane in _LANES]
        _powers[:] = [_cumulated(list(_LANES), room), _cumulated(inverse, room)]
    return _powers[0], _powers[1]


def _cumulated(factors: list[int], count: int) -> U64:
    powers: U64 = np.repeat(np.array(factors, np.uint64)[:, None], count, axis=1).cumprod(axis=1)
    return powers


def _mixed(ids: U64) -> U64:
    """splitmix64's finaliser (Steele, Lea, Flood 2014), a row per lane."""
    x: U64 = ids + _SALTED
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


def _mixed_one(id: int, salt: int) -> int:
    x = (id + salt) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
