"""`Acceptance`: how often drafts were accepted lately, by source and position."""

from __future__ import annotations

from bien.core.speculation.counts import MAX_SOURCES, OTHERS

WINDOW = 256  # rounds of a source, after which all it has seen counts half
PRIOR = 2.0  # rounds that what is expected of a position weighs


class Acceptance:
    """For drafters that report no confidence: the chance of a position once those before it are taken.
    Counted over positions that were reached. Until a position was reached often, it is as good as the one
    before it, and the first has a chance of one half."""

    def __init__(self) -> None:
        self._tried: dict[str, list[float]] = {}
        self._taken: dict[str, list[float]] = {}

    def add(self, source: str, depth: int, accepted: int) -> None:
        """A round whose drafts reached to position `depth` - 1."""
        source = self._known(source)
        tried, taken = self._tried.setdefault(source, []), self._taken.setdefault(source, [])
        while len(tried) < depth:
            tried.append(0.0)
            taken.append(0.0)
        for at in range(min(depth, accepted + 1)):
            tried[at] += 1
            taken[at] += at < accepted
        if tried and tried[0] >= WINDOW:
            tried[:] = [t / 2 for t in tried]
            taken[:] = [t / 2 for t in taken]

    def chances(self, source: str, depth: int) -> list[float]:
        """Of the first `depth` positions."""
        source = self._known(source)
        tried, taken = self._tried.get(source, []), self._taken.get(source, [])
        out, chance = [], 0.5
        for at in range(depth):
            if at < len(tried):
                chance = (taken[at] + PRIOR * chance) / (tried[at] + PRIOR)
            out.append(chance)
        return out

    def _known(self, source: str) -> str:
        return source if source in self._tried or len(self._tried) < MAX_SOURCES else OTHERS
