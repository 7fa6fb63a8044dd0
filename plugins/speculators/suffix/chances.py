"""`Chances`: how often a draft of some kind is taken, as seen so far.

A node's kind is how many tokens agree before it, and the share of weight that its token has among what
followed them. A count ratio alone promises too much: what occurred once followed once in all cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MATCHES = (1, 3, 4, 6, 9, 14, 24, 48)  # at least so many tokens agree
SHARES = (0.0, 0.4, 0.66, 0.99)  # the token's share is larger
CELLS = len(MATCHES) * len(SHARES)
MEMORY = 1024.0  # nodes of a kind until older ones count half
DOUBT = 8.0  # nodes that the first guess is worth


class Chances:
    """`table` [CELLS] float32: the chance that a node is taken once its parent was."""

    def __init__(self) -> None:
        base = np.array([0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94])[:, None]
        share = np.array([0.45, 0.65, 0.85, 1.0])[None]
        self._taken = (base * share * DOUBT).reshape(-1)
        self._tried = np.full(CELLS, DOUBT)
        self.table: NDArray[np.float32] = (self._taken / self._tried).astype(np.float32)

    def learn(self, cell: int, taken: bool) -> None:
        self._tried[cell] += 1.0
        self._taken[cell] += taken
        if self._tried[cell] > MEMORY:
            self._tried[cell] /= 2
            self._taken[cell] /= 2
        self.table[cell] = self._taken[cell] / self._tried[cell]


def cell_of(match: int, share: float) -> int:
    """The kind of a node behind `match` tokens that agree."""
    m = max(i for i, least in enumerate(MATCHES) if match >= least or i == 0)
    s = max(i for i, least in enumerate(SHARES) if share > least or i == 0)
    return m * len(SHARES) + s


def path(parents: Sequence[int], tokens: Sequence[int], text: Sequence[int]) -> list[tuple[int, bool]]:
    """Which nodes of a draft `text`, what really followed, says something about: (node, taken)."""
    out = []
    parent, node = -1, 0
    for real in text:
        taken = -1
        for node, (p, token) in enumerate(zip(parents, tokens, strict=True)):
            if p == parent:
                out.append((node, token == real))
                if token == real:
                    taken = node
        if taken < 0:
            break
        parent = taken
    return out
