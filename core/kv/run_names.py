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

_powers: list[tuple[U64, U64]] = []  # per lane M^i and M^-i, i = 1, 2, ...


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
    first = flat[::2][run] + lengths[run] - left
    contents = [_mixed(first.view(np.uint64), np.uint64(salt)) for salt in _SALTS]
    for i in (left < size).nonzero()[0].tolist():
        for lane, c in zip(
            contents, _pieces(flat, int(run[i]), int(first[i]), int(left[i]), size), strict=True
        ):
            lane[i] = c
    out = np.empty((count, 2), np.uint64)
    for k, (begin, (up, down)) in enumerate(zip(_PAIR.unpack(parent), _powers_to(count), strict=True)):
        sums = (contents[k] * down[:count]).cumsum()
        out[:, k] = (sums + np.uint64(begin)) * up[:count]
    return out.tobytes()


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


def _powers_to(count: int) -> list[tuple[U64, U64]]:
    if not _powers or len(_powers[0][0]) < count:
        room = max(1024, 2 * count)
        _powers[:] = [(_cumulated(lane, room), _cumulated(pow(lane, -1, 1 << 64), room)) for lane in _LANES]
    return _powers


def _cumulated(factor: int, count: int) -> U64:
    return np.full(count, factor, np.uint64).cumprod()


def _mixed(ids: U64, salt: np.uint64) -> U64:
    """splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    x = ids + salt
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _mixed_one(id: int, salt: int) -> int:
    x = (id + salt) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
