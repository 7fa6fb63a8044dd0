"""Forced acceptance: how many drafts count as accepted, drawn from given chances instead of compared.

For studies of speed (InferenceX's synthetic acceptance): texts are then not the model's. No torch: the
simulator uses it too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bien.core.sampling.rng import Purpose, uniforms


def forced_lengths(
    chances: tuple[float, ...], seeds: ArrayLike, positions: ArrayLike, choices: ArrayLike, limits: ArrayLike
) -> NDArray[np.int64]:
    """[R] how many drafts each row accepts, at most its limit: draft j with chance chances[j] once those
    before it are accepted, none beyond the last chance. positions: of the round's first draft, counted from
    the prompt's end; the same round draws the same length again."""
    limit = np.asarray(limits, np.int64)
    out = np.zeros(limit.shape, np.int64)
    going = limit > 0
    for j, chance in enumerate(chances):
        going = going & (j < limit)
        if chance < 1:
            coin = uniforms(seeds, positions, choice=choices, purpose=Purpose.LENGTH, index=j)
            going = going & (coin < chance)
        if not going.any():
            break
        out += going
    return out
