"""`CalibrationFile`: what a calibration has found of an engine, as a file that simulations read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from bien.core.costs.correction import Correction
from bien.core.costs.step import TERMS
from bien.core.errors import UserError, nearest

SCHEMA = "bien.calibration/1"
UNCALIBRATED = 0.4
"""Deviation of the logarithm of predicted seconds without a calibration: that of published TPOTs."""
Factor = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Range(msgspec.Struct, frozen=True):
    """What was observed, from the least to the most."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Residuals(msgspec.Struct, frozen=True):
    """Of predictions, as shares of what was measured. `total`: of the seconds of all of them together."""

    places: int
    median: float
    p90: float
    total: float


class CalibrationFile(msgspec.Struct, frozen=True, kw_only=True):
    """`factors` by the names of `TERMS`. `deviation`: of the logarithm of predicted seconds of many steps
    together, found by leaving out each fifth of the places in turn. `ranges`: tokens and sequences of a
    step, positions that a token sees; beyond them a prediction extrapolates."""

    schema: str = SCHEMA
    factors: dict[str, Factor]
    correction: Correction | None = None
    request_seconds: Factor = 0.0  # on a request's way to the engine and back
    token_seconds: Factor = 0.0  # the same, per token of its prompt
    deviation: Annotated[float, msgspec.Meta(ge=0, le=1)] = UNCALIBRATED
    ranges: dict[str, Range] = {}
    engine: str = ""  # who was observed
    model: str = ""
    machine: str = ""  # a known name, or the path of its file
    layout: dict[str, int] = {}
    formats: dict[str, str] = {}
    fitted: Residuals | None = None
    held_out: Residuals | None = None  # places of which no repeat was fitted to


def read_calibration(path: Path) -> CalibrationFile:
    """UserError names the file, and what is wrong in it."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=CalibrationFile)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"calibration {path}: {error}", field="factors") from None
    if found.schema != SCHEMA:
        raise UserError(f"calibration {path}: schema {found.schema!r}; valid: {SCHEMA!r}", field="factors")
    correction = found.correction
    if correction is not None and not correction.sound:
        raise UserError(
            f"calibration {path}: its correction has lengths {correction.lengths}, {len(correction.places)} "
            f"places and {len(correction.weights)} weights; valid: lengths above 0, as many of both, weights "
            "within 10",
            field="factors",
        )
    if not any(found.factors.values()):
        raise UserError(f"calibration {path}: every factor is 0, steps would cost nothing", field="factors")
    for term in found.factors:
        if term not in TERMS:
            raise UserError(f"calibration {path}: no term {term!r}; {nearest(term, TERMS)}", field="factors")
    return found
