"""Counter-based random numbers: a pure function of (seed, choice, position, purpose).

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011):
the seed is the 64-bit key, the rest is the 128-bit counter. There is no state, so a number is the same
in any batch, order and chunking, with any drafter or none, and after a preemption.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

U64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


class Purpose(IntEnum):
    """What a number is for; numbers of different purposes are independent."""

    TARGET = 0  # the target model's token
    DRAFT = 1  # a drafter's own sampling
    ACCEPT = 2  # the coin of a rejection test
    RESIDUAL = 3  # what takes a rejected draft's place
    LENGTH = 4  # forced acceptance
    NOISE = 5  # Gumbel noise, of which target and drafters share the numbers


def as_u64(values: ArrayLike) -> U64:
    """64-bit integers, signed or not, as the same bits in uint64."""
    array = np.asarray(values)
    return array.astype(np.int64).view(np.uint64) if array.dtype.kind == "i" else array.astype(np.uint64)


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Ten rounds over arrays of one shape; every array holds 32-bit words as uint64."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 32 x 32 bits fit 64
        a, b, c, d = (right >> _SHIFT) ^ b ^ k0, right & _LOW, (left >> _SHIFT) ^ d ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d


def uniforms(
    seeds: ArrayLike,
    positions: ArrayLike,
    *,
    choice: ArrayLike = 0,
    purpose: int = Purpose.TARGET,
    index: int = 0,
) -> NDArray[np.float64]:
    """One float64 in [0, 1) per (seed, choice, position), with all 53 bits random. A choice has 32 bits.
    `index` below 2^24: further numbers of the same purpose at the same position."""
    seed, position, chosen = np.broadcast_arrays(as_u64(seeds), as_u64(positions), as_u64(choice))
    counter = (
        position & _LOW,
        position >> _SHIFT,
        chosen & _LOW,
        np.full_like(position, purpose | index << 8),
    )
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _SHIFT))
    # 27 bits of one word over 26 bits of the next.
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
