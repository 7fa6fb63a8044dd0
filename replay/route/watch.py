"""Routers around routers: one writes down what each decision was made on, one does what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bien.core.worker.messages import WorkerStats
from bien.gateway.routing import Decision, Outcome, Router, RouteRequest, Target, cached_tokens
from bien.replay.route.variant import Placement


class Glance(NamedTuple):
    """What the index and the loads said when a request was placed; tokens."""

    here: int
    best: int
    holder: str
    queued: int
    ahead: int
    reasons: dict[str, Any]


class Watched:
    """A router like `inner`. `glances` is by request id."""

    def __init__(self, inner: Router) -> None:
        self.glances: dict[str, Glance] = {}
        self._inner = inner
        self.observe, self.report, self.close = inner.observe, inner.report, inner.close

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        decision = self._inner.choose(request, targets)
        at = decision.target
        if 0 <= at < len(targets):  # else the gateway has its say
            chosen = targets[at]
            most = max(target.overlap for target in targets)
            holder = chosen if chosen.overlap == most else next(t for t in targets if t.overlap == most)
            self.glances[request.id] = Glance(
                cached_tokens(request, chosen),
                cached_tokens(request, holder),
                holder.worker,
                chosen.stats.queued_tokens + chosen.inflight_tokens,
                holder.stats.queued_tokens + holder.inflight_tokens,
                decision.reasons,
            )
        return decision


class Placed:
    """Every request goes where `placement` says. One that it does not know joins its session, or goes where
    the fewest are."""

    def __init__(self, placement: Placement, workers: Sequence[str]) -> None:
        names = [workers[i] for i in placement.workers]
        self._worker = dict(zip(placement.ids, names, strict=True))
        self._last: dict[str, str] = {}

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        name = self._worker.get(request.id) or self._last.get(request.session)
        at = next((i for i, target in enumerate(targets) if target.worker == name), -1)
        if at < 0:
            at = min(range(len(targets)), key=lambda i: targets[i].inflight)
        self._last[request.session] = targets[at].worker
        return Decision(at, cached_tokens(request, targets[at]))

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        pass

    def report(self, worker: str, stats: WorkerStats) -> None:
        pass

    def close(self) -> None:
        pass
