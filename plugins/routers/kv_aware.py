"""KV-aware routing: the target on which the request costs the fewest predicted milliseconds.

    cost = (uncached prompt tokens + uncomputed tokens ahead of them) * ms_per_prefill_token
         + requests there * ms_per_request

The first term is the work until the first token; the second is what decoding in a fuller batch adds over
the life of the request. One unit, so that a long queue outweighs a cached prefix exactly where waiting
takes longer than computing it again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from bien.core.api import Context, Provider, hookimpl
from bien.gateway.api import Decision, Outcome, RouteRequest, Target, WorkerStats, cached_tokens

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class KVAwareConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The defaults suit one accelerator that prefills 10,000 tokens a second."""

    ms_per_prefill_token: Milliseconds = 0.1
    ms_per_request: Milliseconds = 20.0  # what each request already there adds to this one


class KVAwareRouter:
    def __init__(self, config: KVAwareConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        best: list[int] = []
        lowest = float("inf")
        for i, target in enumerate(targets):
            cost = sum(self._terms(request, target))
            if cost < lowest:
                best, lowest = [i], cost
            elif cost == lowest:
                best.append(i)
        # Ties are the rule on an idle cluster: a fixed choice among them would be a hot spot.
        at = best[0] if len(best) == 1 else self._rng.choice(best)
        prefill, queue, decode = self._terms(request, targets[at])
        reasons: dict[str, float | str] = {
            "prefill_ms": prefill,
            "queue_ms": queue,
            "decode_ms": decode,
            "ties": float(len(best)),
        }
        return Decision(at, cached_tokens(request, targets[at]), reasons)

    def _terms(self, request: RouteRequest, target: Target) -> tuple[float, float, float]:
        token, stats = self._config.ms_per_prefill_token, target.stats
        uncached = request.prompt_tokens - cached_tokens(request, target)
        ahead = stats.queued_tokens + target.inflight_tokens
        # Reported counts lag by a step and include other gateways' requests; ours are exact.
        there = max(stats.running + stats.waiting, target.inflight)
        return uncached * token, ahead * token, there * self._config.ms_per_request

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        pass

    def report(self, worker: str, stats: WorkerStats) -> None:
        pass

    def close(self) -> None:
        pass


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "router",
            "kv-aware",
            _build,
            KVAwareConfig,
            summary="fewest predicted milliseconds: uncached tokens, queue, decode interference",
        )
    ]


def _build(config: KVAwareConfig, ctx: Context) -> KVAwareRouter:
    return KVAwareRouter(config, ctx.rng)
