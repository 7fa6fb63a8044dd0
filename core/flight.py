"""Steps in flight: what was planned and awaits its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from bien.core.sequence import Sequence


@dataclass(slots=True)
class FlightItem:
    """One row of a plan. `epoch` tells whether the sequence still holds the KV that the row wrote."""

    sequence: Sequence
    epoch: int
    start: int
    count: int
    drafts: int
    samples: bool
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)  # (group, position, block)


@dataclass(slots=True)
class Flight:
    step: int
    items: list[FlightItem]
    tokens: int  # positions computed, over all items
