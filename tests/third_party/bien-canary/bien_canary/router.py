"""Pinned first: a session stays where it began, until that place holds too many requests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec

from bien.core.api import Context, Provider, hookimpl
from bien.gateway.api import Decision, Outcome, RouteRequest, Target, WorkerStats, cached_tokens


class PinnedConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`most`: requests in flight at a worker above which its sessions move."""

    most: int = 8


class Pinned:
    def __init__(self, config: PinnedConfig, rng: random.Random) -> None:
        self._most = config.most
        self._rng = rng
        self._home: dict[str, tuple[str, int]] = {}

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        home = self._home.get(request.session)
        for i, target in enumerate(targets):
            if (target.worker, target.dp_rank) == home and target.inflight < self._most:
                return Decision(i, cached_tokens(request, target), {"pinned": 1.0})
        least = min(t.inflight for t in targets)
        i = self._rng.choice([n for n, t in enumerate(targets) if t.inflight == least])
        if request.session:
            self._home[request.session] = (targets[i].worker, targets[i].dp_rank)
        return Decision(i, cached_tokens(request, targets[i]), {"pinned": 0.0})

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        pass

    def report(self, worker: str, stats: WorkerStats) -> None:
        pass

    def close(self) -> None:
        self._home.clear()


def _make(config: PinnedConfig, ctx: Context) -> Pinned:
    return Pinned(config, ctx.rng)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    yield Provider("router", "canary-pinned", _make, PinnedConfig, summary="sessions stay where they began")
