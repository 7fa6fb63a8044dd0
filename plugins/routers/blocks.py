"""Blocks: the cost function of NVIDIA Dynamo's KV router, with its parameters and defaults.

As in `lib/kv-router/src/scheduling/selector/default.rs`, in blocks, the lowest wins:

    decay   = 1 / (1 + overlap_score_credit_decay x (prefill tokens there - fewest of any) / prompt tokens)
    credit  = overlap_score_credit x decay x overlap + host_cache_hit_weight x overlap of slower tiers
    prefill = prefill_load_scale x max(0, (prefill tokens there + prompt) / block - credit)
    cost    = prefill + blocks in use there + those this request adds
            + decode_active_request_weight x requests there

At `temperature` 0 equal minima are drawn from a reservoir; above, a softmax over costs scaled to 0..1.
Our index names one kind of slower tier; its weight is Dynamo's of host memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from bien.core.api import Context, Provider, hookimpl
from bien.gateway.api import Decision, RouteRequest, Target, cached_tokens
from bien.plugins.routers._choice import Passive, load

Weight = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class BlocksConfig(msgspec.Struct, forbid_unknown_fields=True):
    overlap_score_credit: Weight = 1.0
    overlap_score_credit_decay: Weight = 0.0
    host_cache_hit_weight: Weight = 0.75
    prefill_load_scale: Weight = 1.0
    decode_active_request_weight: Weight = 0.0
    temperature: Weight = 0.0


class Blocks(Passive):
    def __init__(self, config: BlocksConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        idlest = min(map(_prefilling, targets))
        terms = [self._terms(request, target, idlest) for target in targets]
        costs = [sum(t) for t in terms]
        at = self._softmax(costs) if self._config.temperature else self._reservoir(costs)
        prefill, decode, requests = terms[at]
        reasons: dict[str, float | str] = {
            "prefill_blocks": prefill,
            "decode_blocks": decode,
            "request_blocks": requests,
        }
        return Decision(at, cached_tokens(request, targets[at]), reasons)

    def _terms(self, request: RouteRequest, target: Target, idlest: int) -> tuple[float, float, float]:
        config, block = self._config, target.info.block_tokens
        prompt, ahead = request.prompt_tokens, _prefilling(target)
        decay = 1 / (1 + config.overlap_score_credit_decay * (ahead - idlest) / prompt)
        credit = config.overlap_score_credit * decay * target.overlap
        credit += config.host_cache_hit_weight * target.loadable
        prefill = config.prefill_load_scale * max(0.0, ahead + prompt - credit) / block
        # Blocks of a cached prefix that nobody uses now come into use; we cannot tell them from others.
        added = math.ceil(prompt / block)
        requests = config.decode_active_request_weight * load(target)
        return prefill, float(target.stats.used_blocks + added), requests

    def _reservoir(self, costs: list[float]) -> int:
        best, least, ties = 0, math.inf, 0
        for i, cost in enumerate(costs):
            if cost < least:
                best, least, ties = i, cost, 1
            elif cost == least:
                ties += 1
                if self._rng.randrange(ties) == 0:
                    best = i
        return best

    def _softmax(self, costs: list[float]) -> int:
        low, high = min(costs), max(costs)
        span = (high - low) * self._config.temperature
        if not span:
            return self._rng.randrange(len(costs))
        weights = [math.exp((low - cost) / span) for cost in costs]
        return self._rng.choices(range(len(costs)), weights)[0]


def _prefilling(target: Target) -> int:
    return target.stats.queued_tokens + target.inflight_tokens


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "router", "blocks", _build, BlocksConfig, summary="Dynamo's cost: uncached and used KV blocks"
        )
    ]


def _build(config: BlocksConfig, ctx: Context) -> Blocks:
    return Blocks(config, ctx.rng)
