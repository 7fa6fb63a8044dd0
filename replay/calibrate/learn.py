"""From observations to a calibration: which places are fitted to, what the others say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.costs.calibrate import Kernel, Places, choose
from bien.core.costs.factors import UNCALIBRATED, CalibrationFile, Range, Residuals
from bien.core.costs.fit import FEWEST, Fit, fit, place
from bien.core.costs.machine import machine_path
from bien.core.costs.observed import Observed
from bien.core.costs.step import StepModel
from bien.core.errors import UserError

Array = NDArray[np.float64]
FITTED = 64  # places, at most
FOLDS = 5
WORST = 0.5  # median error elsewhere, of a fit that is one
LEAST_DEVIATION = 0.02  # no machine repeats itself better
_DESIGN = Kernel(constant=1.0, smooth=0.3, slopes=(0.1, 0.1, 0.1), noise=0.05)


class Subject(msgspec.Struct, frozen=True):
    """What was observed, in words for people; `machine` as its costs are found again."""

    engine: str
    model: str
    machine: str


class Compared(msgspec.Struct, frozen=True):
    """A place: what was measured and what the fit says."""

    place: str
    measured: float  # seconds
    predicted: float
    repeats: int
    fitted: bool  # to it


class Learnt(msgspec.Struct, frozen=True):
    calibration: CalibrationFile
    compared: list[Compared]


def learn(model: StepModel, observed: Sequence[Observed], subject: Subject, most: int = FITTED) -> Learnt:
    """Fits to at most `most` places, two thirds of those there are, chosen by where they lie and not by what
    was measured there; errors are those of the rest. Observations of requests without steps (their way)
    are all fitted to. UserError: they say too little."""
    steps = [o for o in observed if o.steps]
    if len(steps) < FEWEST + 4:
        raise UserError(
            f"steps at {len(steps)} places were recorded; valid: {FEWEST + 4} places or more, some of which "
            "are kept to test on",
            field="calibrate",
        )
    ways = [o for o in observed if not o.steps]
    chosen = set(_choose(steps, most))
    inside = [o for i, o in enumerate(steps) if i in chosen]
    # What differs from a place fitted to by a little more context only is a repeat of it.
    near = {key for o in inside for key in _neighbours(o)}
    rest = [o for i, o in enumerate(steps) if i not in chosen and _key(o) not in near]
    if not rest:
        raise UserError(
            f"all of the {len(steps)} places repeat the {len(inside)} that are fitted to: none is left to "
            "test on",
            field="calibrate",
        )
    found = fit(model, [*inside, *ways])
    held_out = residuals(model, found, rest)
    if not held_out.median < WORST:
        raise UserError(
            f"the fit to {len(inside)} places is off by {held_out.median:.0%} in the median of {len(rest)} "
            f"others; valid: below {WORST:.0%} (was the machine busy with something else?)",
            field="calibrate",
        )
    layout: dict[str, Any] = msgspec.structs.asdict(model.layout)
    calibration = CalibrationFile(
        factors=found.factors,
        correction=found.correction,
        request_seconds=found.request_seconds,
        token_seconds=found.token_seconds,
        deviation=_deviation(model, steps, ways),
        ranges=_ranges(inside),
        engine=subject.engine,
        model=subject.model,
        machine=machine_path(subject.machine),
        layout=layout,
        formats=msgspec.structs.asdict(model.formats),
        fitted=residuals(model, found, inside),
        held_out=held_out,
    )
    calibrated = found.model(model)
    compared = [
        Compared(o.place, o.seconds, found.seconds(calibrated, o), o.repeats, i in chosen)
        for i, o in enumerate(steps)
        if i in chosen or _key(o) not in near
    ]
    return Learnt(calibration, compared)


def residuals(model: StepModel, found: Fit, observed: Sequence[Observed]) -> Residuals:
    calibrated = found.model(model)
    predicted = np.array([found.seconds(calibrated, o) for o in observed])
    measured = np.array([o.seconds for o in observed])
    repeats = np.array([o.repeats for o in observed])
    off = np.abs(predicted / measured - 1)
    total = float((predicted * repeats).sum() / (measured * repeats).sum() - 1)
    return Residuals(len(observed), float(np.median(off)), float(np.quantile(off, 0.9)), total)


def _deviation(model: StepModel, steps: Sequence[Observed], ways: Sequence[Observed]) -> float:
    """What a sum of many steps is off by: each fifth of the places, predicted by the others."""
    order = np.random.default_rng(0).permutation(len(steps))
    totals = []
    for fold in range(FOLDS):
        left = set(order[fold::FOLDS].tolist())
        kept = [o for i, o in enumerate(steps) if i not in left]
        if len(kept) < FEWEST + 4:
            continue
        found = fit(model, [*(kept[i] for i in _choose(kept, FITTED)), *ways])
        totals.append(np.log1p(residuals(model, found, [steps[i] for i in left]).total))
    if len(totals) < FOLDS:
        return UNCALIBRATED  # too few places to say
    return min(UNCALIBRATED, max(LEAST_DEVIATION, float(np.sqrt(np.mean(np.square(totals))))))


def _choose(steps: Sequence[Observed], most: int) -> list[int]:
    places = Places(np.array([_octaves(o) for o in steps]), [""] * len(steps))
    # Steps that come often decide of a whole replay.
    often = np.sqrt(np.array([o.repeats for o in steps], dtype=np.float64))
    return choose(_DESIGN, places, min(most, len(steps) * 2 // 3), often)


def _ranges(observed: Sequence[Observed]) -> dict[str, Range]:
    steps = [s for o in observed for s in o.steps]
    values = {
        "tokens": [float(s.tokens) for s in steps],
        "sequences": [float(s.rows) for s in steps],
        "positions": [s.looked_at / s.tokens for s in steps],
    }
    return {name: Range(min(v), max(v)) for name, v in values.items()}


def _key(o: Observed) -> tuple[str, int]:
    same, _, seen = o.place.rpartition("/")
    return (same, int(seen)) if seen.isdecimal() else (o.place, 0)


def _neighbours(o: Observed) -> list[tuple[str, int]]:
    same, seen = _key(o)
    return [(same, seen + d) for d in (-1, 0, 1)]


def _octaves(o: Observed) -> Array:
    mean: Array = np.mean([place(s) for s in o.steps], axis=0)
    return mean
