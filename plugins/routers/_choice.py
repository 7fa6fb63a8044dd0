"""What the built-in routers share: who is loaded how much, and a fair choice among equals."""

from __future__ import annotations

import random
from collections.abc import Iterable

from bien.gateway.api import Decision, Outcome, Target, WorkerStats


class Passive:
    """A router that learns nothing from how requests went."""

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        pass

    def report(self, worker: str, stats: WorkerStats) -> None:
        pass

    def close(self) -> None:
        pass


def load(target: Target) -> int:
    """Requests there. Reported counts lag by a step and include other gateways' requests; ours are exact."""
    return max(target.stats.running + target.stats.waiting, target.inflight)


def lowest(costs: Iterable[float], rng: random.Random) -> tuple[int, int]:
    """Where the lowest cost is, equals by lot, and how many equals there were. Ties are the rule on an idle
    cluster: a fixed choice among them would be a hot spot."""
    best: list[int] = []
    least = float("inf")
    for i, cost in enumerate(costs):
        if cost < least:
            best, least = [i], cost
        elif cost == least:
            best.append(i)
    return (best[0] if len(best) == 1 else rng.choice(best)), len(best)
