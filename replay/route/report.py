"""`route.json`: what `bien route explain` found. Readers may rely on `schema` "bien.route/1"."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from bien.replay.costs import PoolCosts
from bien.replay.metrics import Distribution
from bien.replay.route.load import TraceCard
from bien.replay.route.variant import Seen

SCHEMA = "bien.route/1"


class RouteLoss(msgspec.Struct):
    """Shares of all prompt tokens, by cause. Their sum is `infinite` - `achieved`, turn by turn:

    shared tokens -rounding-> whole blocks -evicted-> held by some worker when the request was placed
    -other_replica-> held by the chosen one -gone-> cached when it ran
    """

    rounding: float  # to whole blocks, and the last token, which is always computed
    evicted: float  # no worker had it any more, or yet
    other_replica: float  # placed away from the copy
    gone: float  # evicted between placement and run, or predicted and never computed there


class Regret(msgspec.Struct):
    """Against the best placement found, of each figure by itself; never negative."""

    ttft_mean_ms: float
    ttft_p90_ms: float
    hit: float  # of all prompt tokens


class Costliest(msgspec.Struct):
    """A decision that cost much: `ttft_ms` is above what the placement with the best mean took for it."""

    id: str  # session/stream/turn
    ttft_ms: float
    saved_ms: float  # what that placement would have saved
    prompt_tokens: int
    worker: str
    queued_tokens: int  # ahead of it there, when it was placed
    predicted: int  # cached tokens
    cached: int
    holder: str  # the worker that held most of the prompt
    held: int  # tokens
    holder_queued: int  # ahead of it there
    infinite: int  # that an infinite cache would have had
    oracle_worker: str
    oracle_cached: int
    oracle_ttft_ms: float
    reasons: dict[str, Any] = {}  # of the router


class PolicyReport(msgspec.Struct):
    """One router. Hit rates are by tokens."""

    ideal: float  # of one pooled cache of the same total capacity
    achieved: float | None  # None: no turn ended well
    imbalance: float | None  # busy time: the busiest worker over the mean, of the whole run
    ttft_ms: Distribution
    regret: float | None  # mean TTFT over that of the best placement found, less one; None: turns failed
    infinite: float | None  # hit rate of a cache that evicts nothing, in this run's order
    loss: RouteLoss | None
    parity: float | None  # predicted over actual cached tokens
    regrets: Regret | None
    busy_seconds: dict[str, float]
    seconds: float  # of virtual time
    turns: int  # that ended well
    errors: int
    costliest: list[Costliest] = []


class Oracle(msgspec.Struct):
    """The best that was found of each figure, by any policy and by any placement searched for in hindsight:
    a bound from one side, not proved to be the best there is. `by` names who reached it."""

    ttft_mean_ms: float
    ttft_p90_ms: float
    hit: float
    by: dict[str, str]
    tried: dict[str, Trial] = {}  # placements searched for


class Trial(msgspec.Struct):
    """One searched placement, simulated on the same stack."""

    achieved: float | None  # None: no turn ended well
    imbalance: float | None
    ttft_ms: Distribution


class Level(msgspec.Struct):
    """All policies at another load."""

    concurrency: int
    policies: dict[str, Trial]


class RouteReport(msgspec.Struct, kw_only=True):
    schema: str = SCHEMA
    trace: TraceCard
    workers: int
    capacity: int  # tokens of one worker
    concurrency: int
    time_scale: float
    gap_cap: float
    seed: int
    deployment: dict[str, Any]
    costs: list[PoolCosts]
    ideal: float
    oracle: Oracle
    policies: dict[str, PolicyReport]
    best: dict[str, list[str]]  # who has the best of each figure
    failed: list[str] = []  # policies that have failed turns, here or at another level
    levels: list[Level] = []
    notes: list[str] = []


def trial(seen: Seen) -> Trial:
    return Trial(seen.hit if seen.ids else None, imbalance(seen), Distribution.of_array(seen.ttft_ms))


def imbalance(seen: Seen) -> float | None:
    """Busy seconds of the busiest worker over their mean; None when nothing ran."""
    mean = sum(seen.busy) / max(1, len(seen.busy))
    return max(seen.busy) / mean if mean > 0 else None


def losses(seen: Seen) -> RouteLoss:
    """Where the tokens went that an infinite cache would have had."""
    total = max(1.0, float(seen["prompt"].sum()))
    cached = seen["cached"]
    # A prefix may be computed while the request waits: what it finds then is not lost to any cause before.
    here = np.maximum(seen["here"], cached)
    best = np.maximum(seen["best"], here)
    whole = np.maximum(seen["whole"], best)
    shared = np.maximum(seen["shared"], whole)
    steps = (shared - whole, whole - best, best - here, here - cached)
    return RouteLoss(*(float(step.sum()) / total for step in steps))


def found(runs: dict[str, Seen], tried: dict[str, Seen]) -> Oracle:
    """The best of each figure over policies and searched placements, without a turn that failed."""
    every = {name: s for name, s in {**runs, **tried}.items() if s.whole_run}
    mean = {name: s.mean_ttft_ms for name, s in every.items()}
    p90 = {name: float(np.percentile(s.ttft_ms, 90)) for name, s in every.items()}
    hit = {name: s.hit for name, s in every.items()}
    by = {
        "ttft_mean_ms": min(mean, key=mean.__getitem__),
        "ttft_p90_ms": min(p90, key=p90.__getitem__),
        "hit": max(hit, key=hit.__getitem__),
    }
    return Oracle(
        mean[by["ttft_mean_ms"]],
        p90[by["ttft_p90_ms"]],
        hit[by["hit"]],
        by,
        {name: trial(s) for name, s in tried.items()},
    )


def policy_report(seen: Seen, ideal: float, oracle: Oracle) -> PolicyReport:
    ttft = Distribution.of_array(seen.ttft_ms)
    mean, p90 = ttft.mean or 0.0, ttft.p90 or 0.0
    regrets = Regret(mean - oracle.ttft_mean_ms, p90 - oracle.ttft_p90_ms, oracle.hit - seen.hit)
    loss = losses(seen) if seen.ids else None
    cached, predicted = float(seen["cached"].sum()), float(seen["predicted"].sum())
    return PolicyReport(
        ideal=ideal,
        achieved=seen.hit if seen.ids else None,
        imbalance=imbalance(seen),
        ttft_ms=ttft,
        regret=mean / oracle.ttft_mean_ms - 1 if seen.whole_run and oracle.ttft_mean_ms else None,
        infinite=None if loss is None else seen.hit + sum(msgspec.structs.astuple(loss)),
        loss=loss,
        parity=predicted / cached if cached else None,
        regrets=regrets if seen.whole_run else None,
        busy_seconds=dict(zip(seen.workers, seen.busy, strict=True)),
        seconds=seen.seconds,
        turns=len(seen.ids),
        errors=sum(seen.errors.values()),
    )


def best_of(policies: dict[str, PolicyReport]) -> dict[str, list[str]]:
    """Names with the best value of each figure, as it is shown. Policies with failed turns take no part."""
    policies = {name: p for name, p in policies.items() if not p.errors}
    figures = {
        "achieved": {n: -round(p.achieved, 4) for n, p in policies.items() if p.achieved is not None},
        "imbalance": {n: round(p.imbalance, 3) for n, p in policies.items() if p.imbalance is not None},
        "regret": {n: round(p.regret, 4) for n, p in policies.items() if p.regret is not None},
    }
    for part in ("mean", "p50", "p90", "p95", "p99"):
        values = {n: getattr(p.ttft_ms, part) for n, p in policies.items()}
        figures[f"ttft_ms.{part}"] = {n: round(v) for n, v in values.items() if v is not None}
    return {
        figure: [name for name, value in values.items() if value == min(values.values())]
        for figure, values in figures.items()
    }
