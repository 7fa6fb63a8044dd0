"""Round robin: every target in turn. It ignores load and cache; the baseline that others must beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import Decision, RouteRequest, Target, cached_tokens
from bien.plugins.routers._choice import Passive


class RoundRobin(Passive):
    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at = self._count % len(targets)
        self._count += 1
        return Decision(at, cached_tokens(request, targets[at]), {"turn": float(at)})


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("router", "round-robin", _build, summary="every worker in turn, whatever it holds")]


def _build(config: NoParameters, ctx: Context) -> RoundRobin:
    return RoundRobin()
