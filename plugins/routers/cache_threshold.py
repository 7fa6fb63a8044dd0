"""Cache threshold: the rule of the common proxies (`cache_aware` of sglang's router, smg, vllm-router).

    imbalanced = most - fewest requests > balance_abs and most > balance_rel x fewest
    imbalanced                               -> fewest requests
    share of the prompt cached > threshold   -> most cached
    else                                     -> fewest requests

Defaults are smg's; sglang's router and vllm-router have 64 and 1.5. Those proxies guess what is cached from
what they routed; here the index says it, as in smg's event mode. Equals go to fewer requests, then by lot.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from bien.core.api import Context, Provider, hookimpl
from bien.gateway.api import Decision, RouteRequest, Target, cached_tokens
from bien.plugins.routers._choice import Passive, load, lowest


class CacheThresholdConfig(msgspec.Struct, forbid_unknown_fields=True):
    cache_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    balance_abs: Annotated[int, msgspec.Meta(ge=0)] = 32
    balance_rel: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.1


class CacheThreshold(Passive):
    def __init__(self, config: CacheThresholdConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        loads = [load(t) for t in targets]
        cached = [cached_tokens(request, t) for t in targets]
        most, fewest, best = max(loads), min(loads), max(cached)
        why = "cached"
        if most - fewest > self._config.balance_abs and most > self._config.balance_rel * fewest:
            why = "imbalanced"
        elif best <= self._config.cache_threshold * request.prompt_tokens:
            why = "little cached"
        if why == "cached":
            loads = [n if c == best else 1 << 60 for n, c in zip(loads, cached, strict=True)]
        at, _ = lowest(loads, self._rng)
        reasons: dict[str, float | str] = {
            "why": why,
            "requests": float(loads[at]),
            "cached_share": best / request.prompt_tokens,
        }
        return Decision(at, cached[at], reasons)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "router",
            "cache-threshold",
            _build,
            CacheThresholdConfig,
            summary="most cached unless little is or loads differ much: the common proxies' rule",
        )
    ]


def _build(config: CacheThresholdConfig, ctx: Context) -> CacheThreshold:
    return CacheThreshold(config, ctx.rng)
