"""`fit`: the factors of a cost model's terms, from what was observed of an engine.

Non-negative least squares of the relative error (Lawson and Hanson 1974, by scipy): an engine cannot undo
work, and a step of 5 ms must count as much as one of 500. Where few observations cannot tell terms apart,
the fit stays near a roofline of another speed (a ridge towards it), so that it extrapolates as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bien.core.costs.correction import Correction, correct, octaves
from bien.core.costs.observed import Observed, Step
from bien.core.costs.step import ROOFLINE, TERMS, StepModel
from bien.core.errors import UserError

Array = NDArray[np.float64]
FEWEST = 8  # places that a fit needs
RIDGE = 0.03  # weight of the roofline's shape, in relative errors, against one observation each
ROBUST = 3  # rounds in which what all others contradict is weighed less
FAR = 3.0  # usual errors from where it is


@dataclass(frozen=True, slots=True)
class Fit:
    """`factors` by the names of `TERMS`; seconds on the way of a request, and of a token of its prompt."""

    factors: dict[str, float]
    correction: Correction
    request_seconds: float
    token_seconds: float

    def model(self, plain: StepModel) -> StepModel:
        """`plain`, calibrated."""
        return StepModel(plain.a, plain.machine, plain.layout, plain.formats, self.factors, self.correction)

    def seconds(self, calibrated: StepModel, observed: Observed) -> float:
        """What it predicts; `calibrated`: from `model`."""
        way = observed.requests * self.request_seconds + observed.prompt_tokens * self.token_seconds
        return way + sum(
            calibrated.seconds(np.array(s.starts), np.array(s.counts), s.samples) for s in observed.steps
        )


def fit(model: StepModel, observed: Sequence[Observed]) -> Fit:
    """UserError, with the numbers, for observations that say too little: too few, or all alike."""
    if len({o.place for o in observed}) < FEWEST:
        raise UserError(
            f"{len(observed)} observations at {len({o.place for o in observed})} places are too few for a "
            f"calibration; valid: {FEWEST} places or more",
            field="calibrate",
        )
    if bad := [o for o in observed if not o.seconds > 0 or not np.isfinite(o.seconds)]:
        raise UserError(f"an observation at {bad[0].place} took {bad[0].seconds:g} s; valid: above 0")
    a = np.array([_row(model, o) for o in observed])
    y = np.array([o.seconds for o in observed])
    _check_spread(observed)
    weights: Array = np.ones(len(y))
    found = _solve(a, y, weights)
    for _ in range(ROBUST):
        off = np.abs(a @ found / y - 1)
        usual = max(float(np.median(off)), 1e-3)
        weights = np.minimum(1.0, FAR * usual / np.maximum(off, 1e-12))
        found = _solve(a, y, weights)
    n = len(TERMS)
    # What is left is learnt where one step was observed by itself.
    alone = [i for i, o in enumerate(observed) if len(o.steps) == 1 and not o.requests]
    left = np.log(y[alone] / np.maximum(a[alone] @ found, 1e-12))
    places = np.array([place(observed[i].steps[0]) for i in alone]).reshape(-1, 3)
    return Fit(
        dict(zip(TERMS, found[:n].tolist(), strict=True)),
        correct(places, left, [observed[i].repeats for i in alone]),
        float(found[n]),
        float(found[n + 1]),
    )


def place(step: Step) -> Array:
    """The octaves of a step."""
    found: Array = octaves(step.rows, step.tokens, np.array([step.looked_at / step.tokens]))[0]
    return found


def _solve(a: Array, y: Array, weights: Array) -> Array:
    from scipy.optimize import nnls

    relative = a / y[:, None] * weights[:, None]
    plain = np.array([*ROOFLINE, 0.0, 0.0])
    # Of the roofline's own terms, the factor that suits all of them best.
    whole = a @ plain / y
    common = float(np.median(1 / whole[whole > 0])) if (whole > 0).any() else 1.0
    size = np.sqrt(np.square(a / y[:, None]).mean(0))
    ridge = np.diag(RIDGE * np.sqrt(len(y)) * size)
    rows = np.concatenate([relative, ridge])
    wanted = np.concatenate([weights, ridge @ (common * plain)])
    solution, _ = nnls(rows, wanted, maxiter=50 * rows.shape[1])
    out: Array = np.where(size > 0, solution, common * plain)  # a term that never occurred
    return out


def _row(model: StepModel, observed: Observed) -> Array:
    total: Array = np.zeros(len(TERMS) + 2)
    for step in observed.steps:
        starts, counts = np.array(step.starts), np.array(step.counts)
        total[:-2] += model.terms(starts, counts, step.samples).vector()
    total[-2:] = observed.requests, observed.prompt_tokens
    return total


def _check_spread(observed: Sequence[Observed]) -> None:
    """Degenerate: every step of one size says nothing of another."""
    tokens = {s.tokens for o in observed for s in o.steps}
    if len(tokens) < 3:
        raise UserError(
            f"all observed steps compute {', '.join(map(str, sorted(tokens)))} tokens: nothing tells a "
            "step's own cost from its tokens'; valid: steps of three sizes or more",
            field="calibrate",
        )
