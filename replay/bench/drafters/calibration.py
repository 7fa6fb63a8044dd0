"""Calibration of confidences: expected calibration error, and sequential temperature scaling.

DeepSeek, "DSpark" (arXiv 2607.05147): what must be right is the chance that *all* drafts up to a position are
taken, the product of a block's confidences. Positions are scaled from left to right, each by the temperature
(of its logit) that makes the product's error least while those before it stay as they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
GRID = np.exp(np.linspace(np.log(0.25), np.log(4.0), 65))
_TINY = 1e-6


def calibration_error(chance: F64, taken: I64, bins: int = 15) -> float:
    """Of chances [N, n] that a draft is taken once those before it are, and the drafts taken [N]: the
    mean over all (text, position) of |mean chance of all up to there - share where it was so|, by bins."""
    survival: F64 = np.cumprod(chance, 1, np.float64)
    happened = taken[:, None] > np.arange(chance.shape[1])
    return _error(survival.ravel(), happened.ravel(), bins)


def fit_temperatures(chance: F64, taken: I64, bins: int = 15) -> list[float]:
    """One temperature per position, for `scaled`."""
    before: F64 = np.ones(len(chance))
    found: list[float] = []
    for k in range(chance.shape[1]):
        happened = taken > k
        errors = [_error(before * scaled(chance[:, k], float(t)), happened, bins) for t in GRID]
        found.append(float(GRID[int(np.argmin(errors))]))
        before = before * scaled(chance[:, k], found[-1])
    return found


def scaled(chance: F64, temperature: F64 | float) -> F64:
    """Chances whose logits are divided by the temperature (of the last axis' position)."""
    inside = np.clip(chance, _TINY, 1 - _TINY)
    return 1 / (1 + np.exp(-np.log(inside / (1 - inside)) / temperature))


def _error(chance: F64, happened: NDArray[np.bool_], bins: int) -> float:
    where = np.minimum((chance * bins).astype(np.int64), bins - 1)
    apart = np.bincount(where, chance - happened, bins)
    return float(np.abs(apart).sum() / len(chance))
