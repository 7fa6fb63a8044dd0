"""Power of two choices: of two targets drawn by lot, the one with fewer requests.

M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 12(10), 2001. It needs the
load of two workers only, and many gateways with stale counts do not all run to the same one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import Decision, RouteRequest, Target, cached_tokens
from bien.plugins.routers._choice import Passive, load


class PowerOfTwo(Passive):
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        drawn = self._rng.sample(range(len(targets)), min(2, len(targets)))
        at = min(drawn, key=lambda i: load(targets[i]))  # of equals the first drawn
        reasons: dict[str, float | str] = {"requests": float(load(targets[at]))}
        if len(drawn) > 1:
            reasons["other_requests"] = float(load(targets[drawn[drawn[0] == at]]))
        return Decision(at, cached_tokens(request, targets[at]), reasons)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "router", "power-of-two", _build, summary="of two workers by lot, the one with fewer requests"
        )
    ]


def _build(config: NoParameters, ctx: Context) -> PowerOfTwo:
    return PowerOfTwo(ctx.rng)
