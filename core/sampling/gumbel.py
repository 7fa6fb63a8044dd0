"""Gumbel noise: one number per (seed, choice, position, token), the same for target and drafters.

The largest of log-probability plus noise is a draw from the distribution (Gumbel's maximum). Two that draw
with the same noise agree with probability (1 - TV) / (1 + TV) or more, TV the distance of their distributions
(Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding",
arXiv 2408.07978). Philox as in rng.py, in torch, so that a vocabulary's noise is made where its logits are.
"""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bien.core.sampling.rng import Purpose, as_u64

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def largest(
    weights: Tensor, seeds: ArrayLike, positions: ArrayLike, choices: ArrayLike, ids: Tensor | None = None
) -> Tensor:
    """[R] int64: the entry of each row of weights [R, C] >= 0 with the largest log-weight plus noise; never
    one of weight zero. Seeds, positions and choices [R] on the host. `ids` ([C] or [R, C] int64): the token
    of each entry; None: its index."""
    noise = noise_of(weights, seeds, positions, choices, ids)
    return (weights.to(torch.float64).log() + noise).argmax(-1)


def noise_of(
    like: Tensor, seeds: ArrayLike, positions: ArrayLike, choices: ArrayLike, ids: Tensor | None = None
) -> Tensor:
    """[R, C] float64, on the device of `like` [R, C]."""
    rows, width = like.shape
    device = like.device
    seed, position, choice = (_column(v, rows, device) for v in (seeds, positions, choices))
    # One call makes the numbers of two tokens.
    if ids is None:
        token = torch.arange(-(-width // 2), device=device)[None]
        a, b, c, d = _philox(position, token, choice, seed)
        bits = torch.stack((_bits(a, b), _bits(c, d)), -1).flatten(1)[:, :width]
    else:
        token = ids if ids.dim() == 2 else ids[None]
        a, b, c, d = _philox(position, token >> 1, choice, seed)
        odd = (token & 1).bool()
        bits = torch.where(odd, _bits(c, d), _bits(a, b))
    u = (bits.to(torch.float64) + 0.5) * 2.0**-53
    return u.log_().neg_().log_().neg_()


def _column(values: ArrayLike, rows: int, device: torch.device) -> Tensor:
    flat = as_u64(values).view("int64").reshape(-1)
    return torch.from_numpy(flat.copy()).expand(rows)[:, None].to(device)


def _bits(high: Tensor, low: Tensor) -> Tensor:
    return ((high >> 5) << 26) | (low >> 6)


def _philox(position: Tensor, token: Tensor, choice: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    # 32-bit words in int64: products wrap, and shifts extend the sign, which the masks take away.
    a, b, c = position & _LOW, token, choice & _LOW
    d = torch.tensor(int(Purpose.NOISE), device=token.device)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            ((right >> 32) & _LOW) ^ b ^ k0,
            right & _LOW,
            ((left >> 32) & _LOW) ^ d ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d
