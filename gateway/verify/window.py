"""`Window`: the latest comparisons of one worker, and whether they say that its index is wrong.

Counts and shares only: no mean that one long prompt could move, no variance that a burst could. Prompts of
which nothing was claimed and nothing found say nothing, and are not here; what differs for a reason that is
nobody's fault neither (noise.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from bien.gateway.verify.options import VerifyOptions

KEPT, LATEST = 256, 32  # comparisons
LEAST, FAULTS = 8, 6  # comparisons, and such as differ, below which nothing is judged
AGE = 1800.0  # seconds
ALWAYS, RARELY = 0.75, 0.2  # shares that differ, of one namespace and of the others, where only it is wrong


class Space(NamedTuple):
    """Whose blocks: a tenant, or one of its salts."""

    key: bytes  # of its chains
    named: bool  # neither without tenant nor without salt


class Comparison(NamedTuple):
    time: float
    claimed: int  # tokens that the index said are cached
    found: int  # by the engine
    off: int  # claimed - found where they differ by more than a block, else 0
    sent: int  # prompt tokens
    counted: int  # by the engine; -1: it does not say
    space: Space


class Window:
    def __init__(self, options: VerifyOptions) -> None:
        self._options = options
        self._kept: deque[Comparison] = deque(maxlen=KEPT)

    def add(self, comparison: Comparison) -> None:
        self._kept.append(comparison)

    def clear(self) -> None:
        self._kept.clear()

    def latest(self, count: int = LATEST) -> list[Comparison]:
        """At most so many, none much older than the newest; newest last."""
        found = list(self._kept)[-count:]
        return [one for one in found if one.time >= found[-1].time - AGE]

    @property
    def drifted(self) -> bool:
        """Whether the index is wrong more often than chance makes it."""
        latest, options = self.latest(), self._options
        wrong = [one for one in latest if one.off]
        if len(latest) < LEAST or len(wrong) < max(FAULTS, options.fall * len(latest)):
            return False
        told = sum(max(one.claimed, one.found) for one in latest)
        return sum(abs(one.off) for one in wrong) >= options.tokens * told

    @property
    def settled(self) -> bool:
        """Whether it is right, as far as it can be seen."""
        latest = self.latest()
        return len(latest) >= LATEST / 2 and share(latest) <= self._options.recover

    @property
    def lonely(self) -> bool:
        """Whether one namespace is wrong, or all that are named are, while the others are right."""
        all = self.latest(KEPT)
        wrong = {one.space for one in all if one.off}
        if any(space.named for space in wrong) and _alone(all, {o.space for o in all if o.space.named}):
            return True
        return any(_alone(all, {space}) for space in wrong)

    @property
    def suspect(self) -> Space | None:
        """The namespace that is wrong most often."""
        wrong = Counter(one.space for one in self.latest(KEPT) if one.off)
        return wrong.most_common(1)[0][0] if wrong else None


def _alone(all: Sequence[Comparison], spaces: set[Space]) -> bool:
    mine = [one for one in all if one.space in spaces][-2 * FAULTS :]
    others = [one for one in all if one.space not in spaces][-LATEST:]
    if len(mine) < FAULTS or len(others) < FAULTS:
        return False
    return share(mine) >= ALWAYS and share(others) <= RARELY


def share(comparisons: Sequence[Comparison]) -> float:
    """Of those that differ."""
    return sum(one.off != 0 for one in comparisons) / max(1, len(comparisons))
