"""Least loaded: the target with the fewest requests, equals by lot (`least_conn` of the common proxies,
`least-loaded` of Dynamo). It ignores the cache, and that requests differ in size."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import Decision, RouteRequest, Target, cached_tokens
from bien.plugins.routers._choice import Passive, load, lowest


class LeastLoaded(Passive):
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at, ties = lowest(map(load, targets), self._rng)
        reasons: dict[str, float | str] = {"requests": float(load(targets[at])), "ties": float(ties)}
        return Decision(at, cached_tokens(request, targets[at]), reasons)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("router", "least-loaded", _build, summary="the worker with the fewest requests")]


def _build(config: NoParameters, ctx: Context) -> LeastLoaded:
    return LeastLoaded(ctx.rng)
