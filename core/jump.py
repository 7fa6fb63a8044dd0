"""`Jump`: what equal decode steps change in the caches, booked in the order in which they change it.

    step       0 .. k-1     k                              k+1
    launched                [a snapshot's block]           a new block
    settled                 block committed, [snapshot]

A row changes the caches only where it fills a block (step k); all other steps are skipped.
"""

from __future__ import annotations

from bien.core.admission import Admission
from bien.core.chains import extended_chain
from bien.core.flight import FlightItem
from bien.core.settlement import Settlement
from bien.core.snapshots import Snapshots

_RESERVE, _SNAPSHOT, _COMMIT = range(3)  # the order within a step, each for all rows


class Jump:
    def __init__(
        self, admission: Admission, settlement: Settlement, snapshots: Snapshots, block_tokens: int
    ) -> None:
        self._admission = admission
        self._settlement = settlement
        self._snapshots = snapshots
        self._block = block_tokens

    def book(self, items: list[FlightItem], steps: int) -> None:
        """`steps` steps follow each other; the first is launched already, the last is left to be settled."""
        changes = []
        fills = [-(item.start + 1) % self._block for item in items]  # the first step that fills one, by row
        most = max(map(fills.count, fills))
        newest = self._snapshots.replaceable([item.sequence for item in items], most)
        for row, item in enumerate(items):
            extended_chain(item.sequence, (item.start + steps) // self._block, self._block)
            for step in range(fills[row], steps, self._block):
                if step and not (newest and step + self._block < steps):
                    changes.append((step, _SNAPSHOT, row))
                if step < steps - 1:
                    changes += (step, _COMMIT, row), (step + 1, _RESERVE, row)
        for step, change, row in sorted(changes):
            item = items[row]
            if change == _RESERVE:
                self._admission.cover(item.sequence, item.start + step + 1)
            elif change == _SNAPSHOT:
                self._snapshots.take(item, item.start + step + 1)
            else:
                self._settlement.confirm(item, item.start + step + 1)

    def go_on(self, items: list[FlightItem], steps: int) -> None:
        """So many steps have been settled, and the next is launched."""
        for item in items:
            s = item.sequence
            item.start += steps
            s.planned = item.start + 1
            s.promised += 1
            self._admission.cover(s, s.planned)
        for item in items:
            self._snapshots.take(item, item.start + 1)
