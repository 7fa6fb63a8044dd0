"""`Departed`: workers that are gone, until what was counted of each by name is counted of all of them."""

from __future__ import annotations

from bien.gateway.metrics import Compared, Totals

NAME = "(gone)"  # of all whose own counts are kept no longer
SECONDS, MOST = 600.0, 32  # that a worker's counts are kept for, so that who scrapes sees them; and workers


class Departed:
    """Names may be new ones for ever: a fleet that grows and shrinks gives each worker one."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._gone: dict[str, float] = {}  # when; the oldest first

    def left(self, worker: str, now: float) -> None:
        self._gone.pop(worker, None)
        self._gone[worker] = now
        for old, since in list(self._gone.items()):
            if since >= now - SECONDS and len(self._gone) <= MOST:
                return
            del self._gone[old]
            self._fold(old)

    def came(self, worker: str) -> None:
        """It is back."""
        self._gone.pop(worker, None)

    def _fold(self, worker: str) -> None:
        placements, compared = self._totals.placements, self._totals.compared
        if count := placements.pop(worker, 0):
            placements[NAME] = placements.get(NAME, 0) + count
        if (one := compared.pop(worker, None)) is not None:
            compared.setdefault(NAME, Compared()).join(one)
