"""Steps in flight: what was planned and awaits its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from bien.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class FlightItem:
    """One row of a plan. `epoch` tells whether the sequence still holds the KV that the row wrote."""

    sequence: Sequence
    epoch: int
    start: int
    count: int
    drafts: int
    samples: bool
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)  # (group, position, block)
    depth: int = 0  # how far the drafts reach: their number, if they are a chain
    source: str = ""  # of the drafts; "": the drafter

    def last_change(self, steps: int, block_tokens: int) -> int:
        """In which of `steps` equal decode steps this row changes the cache for the last time: it ends, or
        fills a block. Recency follows that order, so a jump settles its rows in it."""
        s = self.sequence
        if s.output_tokens + steps >= s.max_tokens:
            return steps
        return max(0, steps - (self.start + steps) % block_tokens)


@dataclass(slots=True)
class Flight:
    step: int
    items: list[FlightItem]
    tokens: int  # positions computed, over all items
    in_order: bool = False  # jumps only: what they change must be booked step by step (jump.py)
