"""`Correction`: what a fit of factors leaves over, smooth in the size of a step.

Engines have steps that no roofline knows: kernels that work on sixteen rows as fast as on four, graphs
captured for some batch sizes. The logarithm of measured over predicted is a Gaussian process without a mean
(Rasmussen and Williams 2006, chapter 2) over the octaves of sequences, of tokens beyond one for each, and of
positions that a token sees; far from what was measured it says nothing, and the factors alone remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LENGTHS = (0.5, 1.0, 2.0, 4.0)  # octaves over which what is left changes, tried along each axis
NOISES = (0.02, 0.05, 0.1, 0.2)  # of a measurement, tried
CHANCE = 10.0  # over the number of places: the share of the squared error that a choice among lengths and
# noises takes away by chance
SMOOTH = (0.1, 0.2, 0.4)  # deviation of what is left, tried


class Correction(msgspec.Struct, frozen=True):
    """`places`: octaves of each step that was fitted to; `weights` of them; `lengths` along the axes."""

    lengths: tuple[float, float, float]
    places: list[tuple[float, float, float]]
    weights: list[float]

    @property
    def sound(self) -> bool:
        """Whether it can have come from `correct`."""
        small = all(-10 <= w <= 10 for w in self.weights)
        return min(self.lengths) > 0 and len(self.places) == len(self.weights) and small

    def arrays(self) -> tuple[Array, Array]:
        """Scaled places and weights, for `factors`."""
        places = np.array(self.places, dtype=np.float64).reshape(-1, 3)
        return places / np.array(self.lengths), np.array(self.weights)


def octaves(rows: float, tokens: float, positions: Array) -> Array:
    """[n, 3] for n values of `positions`, the mean that a token sees."""
    out = np.empty((len(positions), 3))
    out[:, 0] = np.log2(rows)
    out[:, 1] = np.log2(1 + tokens - rows)
    out[:, 2] = np.log2(np.maximum(positions, 1.0))
    return out


def factors(scaled: Array, weights: Array, at: Array) -> Array:
    """At octaves already divided by the lengths."""
    far = np.square(at[:, None] - scaled[None]).sum(-1)
    out: Array = np.exp(np.exp(-far / 2) @ weights)
    return out


def correct(places: Array, left: Array, repeats: Sequence[int]) -> Correction:
    """`left`: logarithms of measured over predicted at `places`. Lengths and noise are those with which each
    place is best said by the others. Where they cannot (nothing is smooth), weights are zero."""
    # Repeats make a mean surer, but never surer than what the place leaves open.
    unsure = np.diag(0.2 + 0.8 / np.sqrt(np.array(repeats, dtype=np.float64)))
    nothing = Correction((1.0, 1.0, 1.0), _listed(places), [0.0] * len(left))
    if not len(left):
        return nothing
    best = max(0.0, 1 - CHANCE / len(left)) * float(np.square(left).mean()), nothing
    for lengths in product(LENGTHS, LENGTHS, LENGTHS):
        scaled = places / np.array(lengths)
        far = np.square(scaled[:, None] - scaled[None]).sum(-1)
        kernel = np.exp(-far / 2)
        # Only the ratio of noise to what is smooth matters to the mean.
        for ratio in sorted({(noise / smooth) ** 2 for noise, smooth in product(NOISES, SMOOTH)}):
            inverse = np.linalg.inv(kernel + ratio * unsure)
            weights = inverse @ left
            error = float(np.square(weights / np.diag(inverse)).mean())
            if error < best[0]:
                best = error, Correction(lengths, _listed(places), weights.tolist())
    return best[1]


def _listed(places: Array) -> list[tuple[float, float, float]]:
    return [(float(a), float(b), float(c)) for a, b, c in places]
