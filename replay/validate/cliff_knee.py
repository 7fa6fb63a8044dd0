"""Where a curve of TTFT over concurrency has its knee: one rule, for published and predicted curves alike."""

from __future__ import annotations

from collections.abc import Sequence

RISE = 5.0  # a rise of TTFT p50 from one step to the next by more than this is the knee
RULE = f"the first concurrency at which TTFT p50 is more than {RISE:g} times that of the step before"
TOLERANCE = 1  # steps of the grid that a predicted knee may be off


def knee(curve: Sequence[tuple[int, float | None]]) -> int | None:
    """The concurrency of the knee of (concurrency, TTFT p50) in rising order; None: there is none.

    Steps without a value are passed over: the next one is compared with the last that has one.
    """
    before: float | None = None
    for concurrency, ttft in curve:
        if ttft is None:
            continue
        if before is not None and ttft > RISE * before:
            return concurrency
        before = ttft
    return None


def steps_apart(grid: Sequence[int], published: int, predicted: int | None) -> int | None:
    """Steps of the grid from the published knee to the predicted one. None: nothing was predicted up to the
    grid's end, so that it is at least as far as that."""
    return None if predicted is None else grid.index(predicted) - grid.index(published)
