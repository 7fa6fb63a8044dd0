"""Sticky sessions: a session stays where its first request went (`sticky`, `manual` and session affinity of
the common proxies).

A new session goes to the target with the fewest requests; of equals to the one with the fewest sessions, then
by lot, so that sessions which all begin while the cluster is idle are spread. A session whose worker is gone
is placed like a new one. So is one whose worker has more than `overload` times the mean number of requests
and at least `slack` more: it stays at the new place, where its next turns find its prefix.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from bien.core.api import Context, Provider, hookimpl
from bien.gateway.api import Decision, RouteRequest, Target, cached_tokens
from bien.plugins.routers._choice import Passive, load, lowest

Key = tuple[str, str]  # tenant and session
Home = tuple[str, int]  # worker and rank


class StickyConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Of more than `sessions` sessions the least recently used is forgotten."""

    overload: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 2.0
    slack: Annotated[int, msgspec.Meta(ge=0)] = 8
    sessions: Annotated[int, msgspec.Meta(ge=1)] = 100_000


class Sticky(Passive):
    def __init__(self, config: StickyConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._homes: OrderedDict[Key, Home] = OrderedDict()
        self._count: Counter[Home] = Counter()

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        key = (request.tenant, request.session)
        home = self._homes.get(key) if request.session else None
        at = next((i for i, t in enumerate(targets) if (t.worker, t.dp_rank) == home), None)
        why = "new" if home is None else "gone" if at is None else "home"
        if at is not None and self._overloaded(targets, at):
            at, why = None, "overloaded"
        if at is None:
            at = self._place(targets)
        if request.session:
            self._keep(key, targets[at])
        reasons: dict[str, float | str] = {"why": why, "requests": float(load(targets[at]))}
        return Decision(at, cached_tokens(request, targets[at]), reasons)

    def _overloaded(self, targets: Sequence[Target], at: int) -> bool:
        mean, here = sum(map(load, targets)) / len(targets), load(targets[at])
        return here > mean * self._config.overload and here >= mean + self._config.slack

    def _place(self, targets: Sequence[Target]) -> int:
        fewest = min(map(load, targets))
        sessions = (self._count[t.worker, t.dp_rank] if load(t) == fewest else float("inf") for t in targets)
        return lowest(sessions, self._rng)[0]

    def _keep(self, key: Key, target: Target) -> None:
        home = (target.worker, target.dp_rank)
        if (old := self._homes.get(key)) is not None:
            self._leave(old)
        self._homes[key] = home
        self._homes.move_to_end(key)
        self._count[home] += 1
        if len(self._homes) > self._config.sessions:
            self._leave(self._homes.popitem(last=False)[1])

    def _leave(self, home: Home) -> None:
        self._count[home] -= 1
        if not self._count[home]:
            del self._count[home]


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "router", "sticky", _build, StickyConfig, summary="each session stays where its first turn went"
        )
    ]


def _build(config: StickyConfig, ctx: Context) -> Sticky:
    return Sticky(config, ctx.rng)
