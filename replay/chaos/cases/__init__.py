"""The cases, by what they are about."""

from __future__ import annotations

from bien.replay.chaos.case import Case
from bien.replay.chaos.cases import loads, names, restarts, truth

CASES: tuple[Case, ...] = tuple(
    sorted((*restarts.CASES, *loads.CASES, *names.CASES, *truth.CASES), key=lambda case: case.number)
)
