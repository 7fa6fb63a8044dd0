"""KV-aware routing: the target on which the request costs the fewest predicted milliseconds, to itself and to
others.

Until its first token:
    prefill  tokens that are cached nowhere there: base + token x new + pair x new x (their mean position)
    load     tokens that a slower tier holds: loaded x tokens
    queue    tokens ahead of it, at the same prices
    room     slots or memory are taken: the share of them that it needs x a request's mean life
After it:
    decode   row x requests there x the tokens it will write: what a fuller batch adds to each of its steps
For others:
    others   the delay of those that decode there and of one that comes next, by its prefill and in a fuller
             batch, x `others`: computing again what waiting brings as soon is never free
    evicted  KV that must go for it, as far as that will be wanted again, x the price of computing it again;
             where half of the prompt is cached or more, at most a quarter of what that saves
    fair     what the worker has done lately, above the mean and at most all of it, x the price of computing
             the whole prompt, x `fair`: it settles what is all but equal, and outweighs a cached part of
             twice that size at most, be prompts long or short

A long queue so outweighs a cached prefix exactly where waiting takes longer than computing it again: a hot
prefix is copied when that pays. Sessions and tenants stay where their prefixes are because moving costs the
computation of a copy and what that evicts; a session that has nothing anywhere needs room to grow, for which
`evicted` counts what a mean session has had computed.

Among workers that have nothing to do, the one that holds most of a prompt so gets it, however short that is.

Coefficients start as configured and are learned: step and row from busy time between reports; base, token,
pair and loaded from TTFT less the predicted queue; a worker's own speed is a factor. A token's price keeps a
hundredth of what was configured: where TTFT says nothing of it, cached ones are still better than none. Ties
go by lot.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from bien.core.api import Context, Provider, hookimpl
from bien.gateway.api import Bid, Decision, Outcome, RouteRequest, Target, WorkerStats
from bien.plugins.routers._choice import load, lowest
from bien.plugins.routers._fit import Fit
from bien.plugins.routers._held import Held, Key, Returns
from bien.plugins.routers._pace import Pace

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
TERMS = ("prefill", "load", "queue", "room", "decode", "others", "evicted", "fair")
Terms = tuple[float, float, float, float, float, float, float, float]
QUEUE = TERMS.index("queue")
SESSIONS = 100_000  # remembered
LEAST = 0.01  # of the configured price of a token
LOOKS = 8  # workers whose counts are looked at for a request


class KVAwareConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Prices to start from; the defaults suit one accelerator that prefills 10,000 tokens a second. With
    `learn` off they stay."""

    ms_per_prefill_token: Milliseconds = 0.1
    ms_per_token_pair: Milliseconds = 0.0  # attention: a new token and one before it
    ms_per_loaded_token: Milliseconds = 0.01
    ms_per_step: Milliseconds = 10.0
    ms_per_row: Milliseconds = 0.1  # that each sequence adds to a step
    output_tokens: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 200.0  # of a request
    learn: bool = True
    others: Weight = 0.2
    evicted: Weight = 1.0
    fair: Annotated[float, msgspec.Meta(ge=0, le=0.25)] = 0.05


class KVAwareRouter:
    def __init__(self, config: KVAwareConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        step, token = config.ms_per_step, config.ms_per_prefill_token
        self.pace = Pace(step, token, config.ms_per_row, config.output_tokens)
        prices = (step, token, config.ms_per_token_pair, config.ms_per_loaded_token)
        self.prices = Fit(prices, (1.0, 1000.0, 1e7, 1e3), strength=20, memory=1000)
        self._returns = Returns()
        self._held: dict[tuple[str, int], Held] = {}
        self._sessions: OrderedDict[Key, list[int]] = OrderedDict()  # number of the last request, tokens
        self._tokens = 0  # of all of them
        self._count = 0  # requests
        self._looked = 0
        self._context = 0.0  # mean prompt
        self._life = 0.0  # mean milliseconds of a request after its first token

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        self._count += 1
        terms = self._terms(request, targets)
        at, ties = lowest(map(sum, terms), self._rng)
        return self._decide(request, targets, terms, at, ties)

    def bids(self, request: RouteRequest, targets: Sequence[Target]) -> list[Bid]:
        """As a `BiddingRouter`. What others have reserved is another estimate of the queue."""
        return [
            Bid(sum(t) - t[QUEUE], t[QUEUE], t[0] + t[1])  # it keeps others waiting by prefill and load
            for t in self._terms(request, targets)
        ]

    def take(self, request: RouteRequest, targets: Sequence[Target], at: int) -> Decision:
        self._count += 1
        return self._decide(request, targets, self._terms(request, targets), at, 1)

    def _decide(
        self, request: RouteRequest, targets: Sequence[Target], terms: list[Terms], at: int, ties: int
    ) -> Decision:
        key, names = (request.tenant, request.session), [t.worker for t in targets]
        target = targets[at]
        cached, device = _cached(request.prompt_tokens, target)
        self._placed(key, target, request.prompt_tokens - device + self._output(request))
        if len(self.pace) > 4 * len(targets) + 64:  # names of workers that are long gone
            self.pace.keep(names)
            self._held = {place: held for place, held in self._held.items() if place[0] in names}
        reasons: dict[str, float | str] = {
            f"{name}_ms": value for name, value in zip(TERMS, terms[at], strict=True)
        }
        reasons["loaded_tokens"] = float(cached - device)
        reasons["ties"] = float(ties)
        return Decision(at, cached, reasons)

    def _output(self, request: RouteRequest) -> int:
        return min(request.max_tokens, int(self.pace.outputs))

    def _terms(self, request: RouteRequest, targets: Sequence[Target]) -> list[Terms]:
        key, names = (request.tenant, request.session), [t.worker for t in targets]
        self._look(targets)
        config, prompt, output = self._config, request.prompt_tokens, self._output(request)
        base, token, pair, loaded = self.prices.coefficients
        token = max(token, LEAST * config.ms_per_prefill_token)
        ahead_price = token + pair * (self._context or prompt)
        row = self.pace.row * output
        fair = config.fair * prompt * (token + pair * prompt / 2)
        growth = 0
        if self._sessions and not any(t.overlap for t in targets):
            growth = self._tokens // len(self._sessions)
        found: list[Terms] = []
        factors, shares = self.pace.factors(names), self.pace.shares(names)
        for target, factor, share in zip(targets, factors, shares, strict=True):
            stats, there = target.stats, load(target)
            cached, device = _cached(prompt, target)
            new = prompt - cached
            prefill = factor * (base + new * (token + pair * (cached + new / 2)))
            decode = factor * there * row
            delayed = 1 + max(0, there - stats.waiting)  # and whoever comes next
            need = prompt - device + output
            evicted = config.evicted * factor * ahead_price * self._missed(target, need + growth, key)
            if evicted and 2 * cached >= prompt:
                evicted = min(evicted, factor * cached * (token + pair * cached / 2) / 4)
            found.append(
                (
                    prefill,
                    factor * loaded * (cached - device),
                    factor * ahead_price * (stats.queued_tokens + target.inflight_tokens),
                    self._room(target, there, need) if self._life else 0.0,
                    decode,
                    config.others * (delayed * (prefill - factor * base) + decode),
                    evicted,
                    fair * share,
                )
            )
        return found

    def _look(self, targets: Sequence[Target]) -> None:
        # A few in turn: with many workers that all step between two requests, learning must stay cheap.
        for i in range(self._looked, self._looked + min(LOOKS, len(targets))):
            target = targets[i % len(targets)]
            self.pace.look(target.worker, target.stats, learn=self._config.learn)
        self._looked += LOOKS

    def _room(self, target: Target, there: int, need: int) -> float:
        info, stats = target.info, target.stats
        short = 0.0
        if 0 < info.slots <= there:
            short = (there - info.slots + 1) / info.slots
        over = need + (stats.used_blocks - stats.total_blocks) * info.block_tokens
        if over > 0 and stats.used_blocks:
            short = max(short, over / (stats.used_blocks * info.block_tokens))
        return short * self._life

    def _missed(self, target: Target, need: int, key: Key) -> float:
        stats, block = target.stats, target.info.block_tokens
        cached = stats.used_blocks + stats.cached_blocks
        over = need + (cached - stats.total_blocks) * block
        held = self._held.get((target.worker, target.dp_rank))
        if over <= 0 or held is None or not stats.total_blocks:
            return 0.0
        return held.missed(over, cached * block, key, self._count, self._returns)

    def _placed(self, key: Key, target: Target, added: int) -> None:
        place, info = (target.worker, target.dp_rank), target.info
        held = self._held.get(place)
        if held is None or held.generation != info.generation:
            held = self._held[place] = Held(info.generation)
        capacity = target.stats.total_blocks * info.block_tokens or info.capacity_tokens
        if capacity:
            held.add(key, added, self._count, capacity)
        session = self._sessions.get(key)
        if session is None:
            self._returns.note(0)
            self._sessions[key] = [self._count, added]
        else:
            self._returns.note(self._count - session[0])
            session[0] = self._count
            session[1] += added
            self._sessions.move_to_end(key)
        self._tokens += added
        if len(self._sessions) > SESSIONS:
            self._tokens -= self._sessions.popitem(last=False)[1][1]

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        if outcome.ttft < 0 or outcome.cached < 0:
            return
        prompt, cached = outcome.request.prompt_tokens, outcome.cached
        self._context += (prompt - self._context) / 50
        self._life += ((outcome.seconds - outcome.ttft) * 1000 - self._life) / 50
        if not self._config.learn:
            return
        reasons = decision.reasons
        waited = float(reasons.get("queue_ms", 0.0)) + float(reasons.get("room_ms", 0.0))
        ms = max(0.0, outcome.ttft * 1000 - waited) / self.pace.factors([outcome.worker])[0]
        new = prompt - cached
        loaded = min(float(reasons.get("loaded_tokens", 0.0)), cached)
        self.prices.add((1.0, new, new * (cached + new / 2), loaded), ms)
        if self.prices.samples % 16 == 0:
            config, pace = self._config, self.pace
            self.prices.solve((pace.step, pace.token, config.ms_per_token_pair, config.ms_per_loaded_token))

    def report(self, worker: str, stats: WorkerStats) -> None:
        pass  # what it has counted is looked at when a request is placed

    def close(self) -> None:
        pass


def _cached(prompt: int, target: Target) -> tuple[int, int]:
    """Tokens that it need not compute, and those of them that lie in the fastest tier."""
    block = target.info.block_tokens
    return (
        min(target.overlap + target.loadable, prompt - 1) // block * block,
        min(target.overlap, prompt - 1) // block * block,
    )


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "router",
            "kv-aware",
            _build,
            KVAwareConfig,
            summary="fewest predicted milliseconds, learned: prefill, queue, decode, eviction",
        )
    ]


def _build(config: KVAwareConfig, ctx: Context) -> KVAwareRouter:
    return KVAwareRouter(config, ctx.rng)
