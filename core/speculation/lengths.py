"""How many drafts of each sequence are verified: `fixed`, `confidence` or `budget` (options.py).

No rule may let a sampled draft decide by its own token whether it is verified: where such drafts are judged
by their law (`standard`, `block`), the chance of a node depends on the tokens before it only, and the budget
on what was known two steps ago (Cheng et al., "DSpark", 2026, the variant in production). Drafts that a
scheduler leaves out are there again in the next step: only steps with new ones count, and of those that were
there two steps ago none that still is tells anything. Elsewhere, where drafts are not drawn or the text does
not depend on them, it is what is known now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.step_cost import StepCost

F64 = NDArray[np.float64]
STALE = 2  # steps
UNKNOWN = 0.5  # the chance of a node before there were so many
LOOK = 32  # steps after which one looks again at what is not known


@dataclass(slots=True)
class Load:
    """Of the step that is about to be planned, as far as it is known."""

    gaining: int  # sequences that gain a token whatever is drafted
    tokens: int  # positions that are computed beside drafts


def survival(chances: list[float], parents: list[int] | None) -> list[float]:
    """The chance that each node is accepted, from its chance once its parent is."""
    out: list[float] = []
    for at, chance in enumerate(chances):
        parent = at - 1 if parents is None else parents[at]
        out.append(chance * out[parent] if parent >= 0 else chance)
    return out


def depths(count: int, parents: list[int] | None) -> list[int]:
    """How deep each node lies; children of the last known token have depth 1."""
    if parents is None:
        return list(range(1, count + 1))
    out: list[int] = []
    for parent in parents:
        out.append(1 + (out[parent] if parent >= 0 else 0))
    return out


class Lengths:
    """Admits drafts, in the order in which each sequence has them, so that chains stay chains and parents
    keep their place before children."""

    def __init__(self, spec: SpeculationSpec, *, stale: bool = False) -> None:
        """`stale`: drafts are drawn and judged by their law: a budget must not see those it admits."""
        self.cost = StepCost()
        self._spec = spec
        self._stale = stale
        # By round, the chances of its drafts: of this step and of earlier ones with new rounds.
        self._seen: deque[dict[Hashable, list[float]]] = deque(maxlen=STALE + 1)
        self._steps = 0

    def admit(
        self,
        chances: list[list[float]],
        load: Load,
        guessed: bool = False,
        rounds: list[Hashable] | None = None,
    ) -> list[int]:
        """How many nodes of each sequence to verify, from the chance of each that it is accepted.
        `guessed`: the chances are what was observed lately, which no draft tells where none is verified.
        `rounds`: of each sequence, what tells its drafts from all others; None: they are all new."""
        self._steps += 1
        if self._spec.length == "fixed":
            return [len(c) for c in chances]
        if self._spec.length == "confidence":
            least = 0.0 if guessed and self._steps % LOOK == 0 else self._spec.min_chance
            return [_until(c, least) for c in chances]
        gains = _gains(chances)
        known, weight = gains, 1.0
        if self._stale:
            old = self._earlier(chances, rounds or [(self._steps, i) for i in range(len(chances))])
            known = _gains(old or [survival([UNKNOWN] * len(c), None) for c in chances])
            weight = len(chances) / len(old) if old else 1.0
        count = round(weight * self._budget(known, weight, load))
        return self.best(chances, self._looked(min(count, len(gains)), len(gains), load, guessed))

    def best(self, chances: list[list[float]], count: int) -> list[int]:
        """The `count` likeliest nodes, by sequence. A node counts as no likelier than those before it."""
        sizes = [len(c) for c in chances]
        if count >= sum(sizes):
            return sizes
        owner = np.repeat(np.arange(len(sizes)), sizes)
        at = np.concatenate([np.arange(n) for n in sizes])
        chosen = np.lexsort((owner, at, -_gains(chances)))[:count]
        found: list[int] = np.bincount(owner[chosen], minlength=len(sizes)).tolist()
        return found

    def _earlier(self, chances: list[list[float]], rounds: list[Hashable]) -> list[list[float]]:
        # Chances two steps ago, of rounds that have ended.
        now = dict(zip(rounds, chances, strict=True))
        if not self._seen or not now.keys() <= self._seen[-1].keys():
            self._seen.append(now)
        if len(self._seen) <= STALE:
            return []
        return [row for round, row in self._seen[0].items() if round not in now]

    def _budget(self, gains: F64, weight: float, load: Load) -> int:
        """How many of the best `gains`, each of which stands for `weight` nodes."""
        gains = np.sort(gains)[::-1]
        expected = load.gaining + weight * np.concatenate(([0.0], np.cumsum(gains)))
        seconds = self.cost.seconds(load.tokens + weight * np.arange(len(expected), dtype=np.float64))
        return int(np.argmax(expected / seconds))

    def _looked(self, count: int, most: int, load: Load, guessed: bool) -> int:
        """Once in a while a step without drafts, or with all, where nothing like it was seen lately: a cost
        that is never paid, or a drafter that is never asked, would stay what it was once taken for."""
        turn = self._steps % LOOK
        if turn == LOOK // 2 and count and not self.cost.knows(load.tokens):
            return 0
        if turn == 0 and count < most and (guessed or not self.cost.knows(load.tokens + most)):
            return most
        return count


def _until(chances: list[float], least: float) -> int:
    # Up to the last that is likely enough: in a tree it may lie behind siblings that are not.
    return max((at + 1 for at, c in enumerate(chances) if c >= least), default=0)


def _gains(chances: list[list[float]]) -> F64:
    # A node is reached only with those before it, so that it promises no more than they do.
    return np.fromiter((c for row in chances for c in accumulate(row, min)), np.float64)
