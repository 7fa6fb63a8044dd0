"""Published points against predictions: uncalibrated, and after a few points of the same group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from bien.core.costs.calibrate import Calibration, Kernel, Places, choose, interval
from bien.core.errors import UserError
from bien.replay.validate.points import Point, Table
from bien.replay.validate.roofline import MIDDLE, Prediction, Roofline, Unpredictable

FEWEST = 4  # configurations of a group that is worth a calibration, on two thirds of them at most
MODES = ("agg", "disagg")
GOALS = {"tpot": 0.10, "ttft": 0.20}
# Round numbers. Others, tuned on half of the published groups, err as much on the other half.
_EVERYWHERE = (0.2,) * len(MIDDLE)
KERNELS = {
    "tpot": Kernel(constant=1.0, smooth=0.3, version=0.2, slopes=_EVERYWHERE, noise=0.05, doubt=3.0),
    "ttft": Kernel(constant=1.0, smooth=0.5, version=0.2, slopes=_EVERYWHERE, noise=0.1, doubt=3.0),
}
PLAIN = {"tpot": 0.4, "ttft": 0.9}
"""Deviation of the logarithm of an uncalibrated prediction's factor; on published groups 90 % lie within."""
DESIGN = KERNELS["ttft"]  # says where to measure


class Value(msgspec.Struct, frozen=True):
    """A prediction with its interval and where it comes from: "roofline", "interpolated" between calibration
    points or "extrapolated" from them. A measured one is predicted for nobody."""

    seconds: float
    low: float
    high: float
    provenance: str


class Compared(msgspec.Struct, frozen=True):
    """One point that was not calibrated on."""

    id: str
    measured: float  # seconds
    uncalibrated: Value
    calibrated: Value


class Errors(msgspec.Struct, frozen=True):
    """Medians of |predicted / measured - 1| over the same points, and how often intervals held the truth."""

    uncalibrated: float | None
    calibrated: float | None
    covered_uncalibrated: float | None
    covered: float | None
    points: int
    extrapolated: int


class Group(msgspec.Struct, frozen=True):
    model: str
    gpu: str
    framework: str
    precision: str
    mode: str  # "agg" or "disagg"
    points: int  # measurements, copies left out
    configurations: int
    calibrated_on: list[str]  # ids
    tpot: Errors
    ttft: Errors
    assumed: list[str]  # what was not as the rows say
    known: bool  # whether model and gpu are; if not, a stand-in's costs are calibrated
    why_not: str = ""  # it was not calibrated


class Outcome(msgspec.Struct, frozen=True):
    rows: int
    dropped: dict[str, int]  # rows that say too little, or nonsense
    copies: int  # rows that repeat another one's measurement to the digit
    unpredicted: dict[str, int]
    calibrate: int
    goals: dict[str, float]
    median_error: dict[str, float | None]  # of all points together, known groups
    median_error_uncalibrated: dict[str, float | None]
    median_of_groups: dict[str, float | None]
    groups_within_goal: dict[str, int]
    groups_calibrated: int
    by_mode: dict[str, dict[str, Errors]]
    stand_ins: dict[str, Errors]  # unknown models and gpus, not in the figures above
    covered: dict[str, float | None]
    noise: dict[str, dict[str, Noise]]  # by mode
    groups: list[Group]
    compared: dict[str, list[Compared]]


class Noise(msgspec.Struct, frozen=True):
    """What repeats of one configuration differ by: the floor of every error. Deviations from their mean."""

    configurations: int
    median: float | None
    p90: float | None


def validate(table: Table, calibrate: int) -> Outcome:
    """UserError: `calibrate` is negative, or no row can be predicted."""
    if calibrate < 0:
        raise UserError(f"--calibrate is {calibrate}; valid: 0 or more", field="calibrate")
    roofline, unpredicted = Roofline(), Counter[str]()
    known: dict[tuple[str, ...], dict[object, tuple[Point, Prediction]]] = {}
    copies = 0
    for point in table.points:
        try:
            prediction = roofline.predict(point)
        except Unpredictable as why:
            unpredicted[str(why)] += 1
            continue
        members = known.setdefault(point.group, {})
        copies += point.print in members
        members.setdefault(point.print, (point, prediction))
    if not known:
        raise UserError(
            "no row can be predicted: " + ("; ".join([*table.dropped, *unpredicted]) or "no rows")
        )
    groups: list[Group] = []
    compared = {target: list[tuple[Group, Compared]]() for target in GOALS}
    for key in sorted(known):
        group, found = _group(list(known[key].values()), calibrate)
        groups.append(group)
        for target, values in found.items():
            compared[target] += [(group, value) for value in values]
    sure = {t: [c for g, c in values if g.known] for t, values in compared.items()}
    total = {t: errors(values) for t, values in sure.items()}
    named = [g for g in groups if g.known and g.calibrated_on]
    return Outcome(
        rows=table.rows,
        dropped=table.dropped,
        copies=copies,
        unpredicted=dict(unpredicted),
        calibrate=calibrate,
        goals=GOALS,
        median_error={t: e.calibrated for t, e in total.items()},
        median_error_uncalibrated={t: e.uncalibrated for t, e in total.items()},
        median_of_groups={t: _median([getattr(g, t).calibrated for g in named]) for t in GOALS},
        groups_within_goal={
            t: sum(1 for g in named if (getattr(g, t).calibrated or 0.0) <= goal) for t, goal in GOALS.items()
        },
        groups_calibrated=len(named),
        by_mode={
            mode: {t: errors([c for g, c in v if g.known and g.mode == mode]) for t, v in compared.items()}
            for mode in MODES
        },
        stand_ins={t: errors([c for g, c in v if not g.known]) for t, v in compared.items()},
        covered={t: e.covered for t, e in total.items()},
        noise={
            mode: {
                t: _noise([p for g in known.values() for p, _ in g.values() if p.group[-1] == mode], t)
                for t in GOALS
            }
            for mode in MODES
        },
        groups=groups,
        compared={t: [c for _, c in v] for t, v in compared.items()},
    )


def errors(compared: Sequence[Compared]) -> Errors:
    def share(hits: list[bool]) -> float | None:
        return float(sum(hits) / len(hits)) if hits else None

    return Errors(
        _median([_off(c.uncalibrated, c) for c in compared]),
        _median([_off(c.calibrated, c) for c in compared]),
        share([c.uncalibrated.low <= c.measured <= c.uncalibrated.high for c in compared]),
        share([c.calibrated.low <= c.measured <= c.calibrated.high for c in compared]),
        len(compared),
        sum(c.calibrated.provenance == "extrapolated" for c in compared),
    )


def _group(
    members: list[tuple[Point, Prediction]], calibrate: int
) -> tuple[Group, dict[str, list[Compared]]]:
    # One measurement per configuration may be calibrated on: the first.
    first: dict[object, int] = {}
    for i, (point, _) in enumerate(members):
        first.setdefault(point.configuration, i)
    candidates = list(first.values())
    places = Places(np.array([p.features for _, p in members]), [p.version for p, _ in members])
    count, why_not = min(calibrate, len(candidates) * 2 // 3), ""
    if len(candidates) < FEWEST or not calibrate:
        count = 0
        why_not = "no calibration asked for" if not calibrate else f"fewer than {FEWEST} configurations"
    chosen = [candidates[i] for i in choose(DESIGN, places.take(candidates), count)] if count else []
    used = {members[i][0].configuration for i in chosen}
    prints = {members[i][0].print for i in chosen}
    rest = [i for i, (p, _) in enumerate(members) if p.configuration not in used and p.print not in prints]
    compared = {
        target: _compare(target, members, places, chosen, rest) if chosen or not calibrate else []
        for target in GOALS
    }
    point = members[0][0]
    assumed = sorted({note for _, p in members for note in p.assumed})
    group = Group(
        *point.group,
        points=len(members),
        configurations=len(candidates),
        calibrated_on=[members[i][0].id for i in chosen],
        tpot=errors(compared["tpot"]),
        ttft=errors(compared["ttft"]),
        assumed=assumed,
        known=not any("is unknown" in note for note in assumed),
        why_not=why_not,
    )
    return group, compared


def _compare(
    target: str, members: list[tuple[Point, Prediction]], places: Places, chosen: list[int], rest: list[int]
) -> list[Compared]:
    kernel = KERNELS[target]
    at, of = places.take(chosen), places.take(rest)
    ratios = [_of(members[i][0], target) / _of(members[i][1], target) for i in chosen]
    calibration = Calibration(kernel, at, ratios)
    factors, deviations = calibration.factors(of)
    inside = calibration.within(of)
    compared = []
    for j, i in enumerate(rest):
        point, prediction = members[i]
        base = _of(prediction, target)
        how = "roofline" if not chosen else "interpolated" if inside[j] else "extrapolated"
        plain = _value(base, 1.0, PLAIN[target], "roofline")
        compared.append(
            Compared(
                point.id,
                _of(point, target),
                plain,
                _value(base, float(factors[j]), float(deviations[j]), how) if chosen else plain,
            )
        )
    return compared


def _value(base: float, factor: float, deviation: float, provenance: str) -> Value:
    low, high = interval(factor, deviation)
    return Value(base * factor, base * low, base * high, provenance)


def _of(thing: Point | Prediction, target: str) -> float:
    return thing.tpot if target == "tpot" else thing.ttft


def _off(value: Value, c: Compared) -> float:
    return float(abs(value.seconds / c.measured - 1))


def _median(values: Sequence[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return float(median(found)) if found else None


def _noise(points: list[Point], target: str) -> Noise:
    repeats: dict[object, list[float]] = {}
    for point in points:
        repeats.setdefault(point.configuration, []).append(_of(point, target))
    spreads = [float(np.std(v) / np.mean(v)) for v in repeats.values() if len(v) > 1]
    if not spreads:
        return Noise(0, None, None)
    return Noise(len(spreads), float(median(spreads)), float(np.quantile(spreads, 0.9)))
