"""`keep_row`, `draw_row`: the head of a distribution and one token from it, on the host, without sorting the
tail.

Top-k, top-p and min-p keep the heaviest tokens, so a row is cut to candidates first: those that weigh at
least a bound under which no token can be kept.

    top-k    the k-th largest of the maxima of pieces: k tokens weigh as much or more
    top-p    (1 - p) of the total, divided by the vocabulary: all lighter ones together weigh less than 1 - p
    min-p    the least weight itself

Real models' distributions are peaked, and leave a few hundred candidates of 49,152. Flat ones leave most;
there the weight at which top-p ends is enclosed by two order statistics of a sample (Floyd and Rivest 1975,
"Expected time bounds for selection"), and only what lies between is sorted; that it does lie between is
checked, so the result is exact. All sums are in float64: a token drawn is the first, in index order, at
which the cumulative weight of the kept ones exceeds u of their total.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[Any]  # float32 or float64, >= 0, the heaviest 1

_SORTED = 16_384  # candidates that are gathered and sorted: less work than to sample them and go on with all
_EVERY = 16  # one candidate in so many is in the sample
_PIECE = 256  # tokens per piece of a two-level cumulative sum
_PIECES = 4  # pieces per token of top-k, at least: with more of them fewer candidates are in vain


def draw_row(weights: Weights, u: float, top_p: float, top_k: int, min_p: float) -> int:
    """The token at quantile u in [0, 1) of those that `keep_row` keeps."""
    return keep_row(weights, top_p, top_k, min_p).at(u)


def keep_row(weights: Weights, top_p: float, top_k: int, min_p: float) -> Kept:
    """The tokens that all filters leave: the top_k heaviest, of these the smallest set that
    reaches top_p of their weight (the token that crosses it included), of these the ones that weigh min_p or
    more; of equal weights the lower index stays.

    weights: [V]. top_p: 1 or more is off. top_k: 1..V. min_p: 0..1.
    """
    least, total = _bound(weights, top_p, top_k, min_p)
    kept = Kept(weights)
    if least > 0:
        candidates = weights >= least
        if np.count_nonzero(candidates) <= _SORTED:
            kept = kept.only(candidates)
    if len(kept.weights) > top_k:
        rank = len(kept.weights) - top_k
        kept = kept.only(_heaviest(kept.weights, top_k, np.partition(kept.weights, rank)[rank]))
    if top_p < 1:
        total = total or float(kept.weights.sum(dtype=np.float64))
        kept = kept.only(_heaviest(kept.weights, *_nucleus(kept.weights, top_p * total, total)))
    if min_p > 0:  # compared in the dtype of the weights, so that the heaviest has a min_p of 1
        kept = kept.only(kept.weights >= weights.dtype.type(min_p))
    return kept


def _bound(weights: Weights, top_p: float, top_k: int, min_p: float) -> tuple[Any, float]:
    # The least weight of a candidate; the total weight, where top-p needs it.
    vocab, number = len(weights), weights.dtype.type
    if top_k >= vocab:
        if top_p >= 1:
            return number(min_p), 0.0
        total = float(weights.sum(dtype=np.float64))
        # A little less: the sum of the light ones is rounded too.
        return number(max(min_p, (1 - top_p) * total * (0.999 / vocab))), total
    # What top-k leaves is the total of top-p: there min-p may not take from it before.
    least = number(min_p if top_p >= 1 else 0)
    width = vocab // (_PIECES * top_k)
    if width > 1:
        pieces = vocab // width
        maxima = weights[: pieces * width].reshape(width, pieces).max(0)
        least = max(least, np.partition(maxima, pieces - top_k)[pieces - top_k])
    return least, 0.0


class Kept:
    """Tokens that no filter has taken, with their weights. While they are many the others stay beside them,
    with weight zero: to gather a large share of a row costs more than to go through all of it."""

    __slots__ = ("index", "weights")

    def __init__(self, weights: Weights, index: NDArray[np.int64] | None = None) -> None:
        self.weights = weights
        self.index = index  # None: all

    def only(self, chosen: NDArray[np.bool_]) -> Kept:
        if np.count_nonzero(chosen) > _SORTED:
            return Kept(self.weights * chosen, self.index)
        at = np.flatnonzero(chosen)
        return Kept(self.weights[at], at if self.index is None else self.index[at])

    def at(self, u: float) -> int:
        """The token at quantile u in [0, 1), in index order."""
        if not len(
            self.weights
        ):  # logits that are no numbers: those who share the step must not fail with it
            return 0
        at = _find(self.weights, u, "right")
        return at if self.index is None else int(self.index[at])

    def spread(self, out: Weights) -> None:
        """Write all weights of the row to out [V], zero for the tokens that are not kept."""
        if self.index is None:
            out[:] = self.weights
        else:
            out[:] = 0
            out[self.index] = self.weights


def _find(weights: Weights, share: float, side: Literal["left", "right"], goal: float | None = None) -> int:
    # The first token whose cumulative weight exceeds (right) or reaches (left) a share of the total, or a
    # goal. In two levels, sums of pieces and then one piece: sums can be vectorised, cumulative ones cannot.
    ends = np.add.reduceat(weights, np.arange(0, len(weights), _PIECE), dtype=np.float64).cumsum()
    point = share * float(ends[-1]) if goal is None else goal
    # Rounding may carry the point over a total; it must never choose a token of weight zero.
    point = min(point, _limit(ends[-1], side))
    piece = int(ends.searchsorted(point, side=side))
    first, start = piece * _PIECE, float(ends[piece - 1]) if piece else 0.0
    below = weights[first : first + _PIECE].cumsum(dtype=np.float64)
    point = min(point - start, _limit(below[-1], side))
    return first + int(below.searchsorted(point, side=side))


def _limit(total: Any, side: str) -> float:
    return float(np.nextafter(total, 0) if side == "right" else total)


def _heaviest(weights: Weights, size: int, least: Any) -> NDArray[np.bool_]:
    # Which are the `size` heaviest, the lightest of them weighing `least`.
    chosen: NDArray[np.bool_] = weights >= least
    surplus = np.count_nonzero(chosen) - size
    if surplus > 0:
        equal = np.flatnonzero(weights == least)
        chosen[equal[len(equal) - surplus :]] = False
    return chosen


def _nucleus(weights: Weights, goal: float, total: float) -> tuple[int, Any]:
    # How many of the heaviest reach `goal` together, and the lightest of them.
    if len(weights) > _SORTED:
        found = _enclosed(weights, goal, goal / total)
        if found is not None:
            return found
    return _crossing(weights, goal, 0)


def _enclosed(weights: Weights, goal: float, share: float) -> tuple[int, Any] | None:
    sample = np.sort(weights[::_EVERY])[::-1]
    at = _find(sample, share, "left")
    spread = 3 * int(len(sample) ** 0.5)
    high = sample[at - spread] if at >= spread else weights.dtype.type(np.inf)
    low = sample[at + spread] if at + spread < len(sample) else weights.dtype.type(0)
    above = weights > high
    heavy = float((weights * above).sum(dtype=np.float64))
    if heavy >= goal:
        return None
    between = weights[np.flatnonzero((weights >= low) ^ above)]
    if heavy + float(between.sum(dtype=np.float64)) < goal:
        return None
    return _crossing(between, goal - heavy, int(np.count_nonzero(above)))


def _crossing(weights: Weights, goal: float, count: int) -> tuple[int, Any]:
    # `count` others weigh more than all of `weights`; these have `goal` to reach.
    order = np.sort(weights)[::-1]
    at = _find(order, 1.0, "left", goal)
    return count + at + 1, order[at]
