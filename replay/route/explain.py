"""`explain`: every policy, one pool of all cache, and placements found in hindsight, on one trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bien.core.compose import compose
from bien.core.deployment import MOST_TOKENS, Deployment
from bien.core.errors import BienError, UserError
from bien.core.plugins import PluginManager
from bien.replay.costs import pool_costs
from bien.replay.options import ReplayOptions
from bien.replay.route.costliest import costliest
from bien.replay.route.crew import Alone, Crew, Processes
from bien.replay.route.load import TraceCard, blocks_for, fitting, read_sessions
from bien.replay.route.policies import chosen_policies, with_router
from bien.replay.route.pooled import pooled
from bien.replay.route.report import (
    Level,
    RouteReport,
    best_of,
    found,
    policy_report,
    trial,
)
from bien.replay.route.variant import Hindsight, Seen, Variant
from bien.replay.simulation import build_workers, simulated, with_workers

POOL = "one pool"
BASE = "round-robin"  # router where none is compared: of the one pool, and below placements in hindsight
MOST_JOBS = 256


class RoutePlan(msgspec.Struct, frozen=True):
    """What is compared. None: what the deployment says (workers, capacity), all (sessions)."""

    traces: tuple[Path, ...]
    deployment: Deployment
    workers: int | None = None
    capacity: int | None = None  # tokens of one worker
    concurrency: int = 32
    sessions: int | None = None
    time_scale: float = 1.0
    gap_cap: float = 60.0
    seed: int = 0
    policies: tuple[str, ...] = ()  # none: all installed
    ladder: tuple[int, ...] = ()
    requests: int = 0  # costliest decisions that are explained
    rounds: int = 1  # of searching for a placement in hindsight
    skip_longer: bool = False
    jobs: int = 1

    def check(self) -> RoutePlan:
        """UserError naming the option that is out of range."""
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers is {self.workers}; valid: 1 or more")
        if self.capacity is not None and not 1 <= self.capacity <= MOST_TOKENS:
            text = f"valid: tokens of one worker, 1 to {MOST_TOKENS}"
            raise UserError(f"--capacity is {self.capacity}; {text}")
        if not 1 <= self.jobs <= MOST_JOBS:
            raise UserError(f"--jobs is {self.jobs}; valid: 1 to {MOST_JOBS}")
        if self.requests < 0:
            raise UserError(f"--requests is {self.requests}; valid: 0 (none) or more")
        if not 0 <= self.rounds <= 100:
            raise UserError(f"--rounds is {self.rounds}; valid: 0 (policies only) to 100")
        ReplayOptions(self.concurrency, 1.0, self.time_scale, self.gap_cap, self.sessions, self.seed).check()
        for trees in self.ladder:
            if not 1 <= trees <= 100_000:
                raise UserError(f"--ladder holds {trees}; valid: session trees at a time, 1 to 100000")
        if len(set(self.ladder)) < len(self.ladder):
            raise UserError(f"--ladder is {','.join(map(str, self.ladder))}; valid: each number once")
        return self


class Course:
    """How far it is: told to `on_progress` as (turns simulated, of how many)."""

    def __init__(self, turns: int, variants: int, on_progress: Callable[[int, int], None]) -> None:
        self._total = turns * variants
        self._done: dict[int, tuple[Variant, int]] = {}  # the variant is held: its id is its own
        self._tell = on_progress

    def note(self, variant: Variant, turns: int) -> None:
        self._done[id(variant)] = variant, turns
        self._tell(sum(turns for _, turns in self._done.values()), self._total)


def explain(
    plan: RoutePlan, manager: PluginManager, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> RouteReport:
    """Simulate all of it.

    Raises:
        BienError: an option, the deployment, a router or the trace is wrong.
    """
    plan.check()
    deployment, notes = prepared(plan)
    policies, left_out = chosen_policies(plan.policies, deployment, manager)
    sessions, card = read_sessions(plan.traces, plan.sessions, manager)
    capacity = plan.capacity or _capacity(deployment, manager)
    block_tokens = deployment.model.block_tokens
    if plan.capacity is None and capacity < card.longest and not plan.skip_longer and _elastic(deployment):
        raised = blocks_for(card.longest, block_tokens)
        notes.append(f"capacity is {raised:,}, not {capacity:,} tokens: the longest turn needs that")
        capacity = raised
    sessions, card = fitting(sessions, card, capacity, block_tokens, plan.skip_longer)
    if beyond := [n for n in (plan.concurrency, *plan.ladder) if n > card.sessions]:
        trees = ", ".join(map(str, beyond))
        notes.append(f"{trees} session trees at a time: the trace holds {card.sessions}, all run at once")
    policies = {name: sized(d, capacity, card) for name, d in policies.items()}
    base = sized(with_router(deployment, BASE), capacity, card)
    crew: Crew = Alone(sessions, manager) if plan.jobs == 1 else Processes(sessions, plan.jobs)
    try:
        return _explain(plan, manager, crew, base, policies, card, capacity, [*notes, *left_out], on_progress)
    finally:
        crew.close()


def prepared(plan: RoutePlan) -> tuple[Deployment, list[str]]:
    """The deployment that is simulated, and what was put in place of what cannot be."""
    pools = plan.deployment.pool
    if len(pools) != 1:
        names = ", ".join(repr(pool.name) for pool in pools)
        raise UserError(f"routers are compared on one pool of equal workers; this deployment has {names}")
    if pools[0].dp_ranks > 1:
        raise UserError(
            f"pool {pools[0].name!r}: dp_ranks is {pools[0].dp_ranks}, and placements are searched over "
            f"workers of one engine; valid: dp_ranks = 1, count = {pools[0].engines}",
            field="dp_ranks",
        )
    deployment = plan.deployment if plan.workers is None else with_workers(plan.deployment, plan.workers)
    return simulated(deployment)


def _capacity(deployment: Deployment, manager: PluginManager) -> int:
    if (tokens := deployment.pool[0].kv_tokens) is not None:
        return tokens
    one = msgspec.structs.replace(deployment, pool=(msgspec.structs.replace(deployment.pool[0], count=1),))
    (worker,) = build_workers(compose(one, manager), 0)
    worker.close()
    return worker.info.capacity_tokens


def _elastic(deployment: Deployment) -> bool:
    return "machine" not in deployment.pool[0].executor.parameters


def sized(deployment: Deployment, capacity: int, card: TraceCard) -> Deployment:
    """With workers that hold `capacity` tokens and take the longest prompt, and a gateway that queues all."""
    pool = msgspec.structs.replace(deployment.pool[0], kv_tokens=capacity, kv_memory=None)
    context = max(card.longest, deployment.model.max_context or 0)
    model = msgspec.structs.replace(deployment.model, max_context=context)
    gateway = msgspec.structs.replace(
        deployment.gateway, max_inflight=max(1 << 20, deployment.gateway.max_inflight)
    )
    return msgspec.structs.replace(deployment, model=model, pool=(pool,), gateway=gateway)


def _explain(
    plan: RoutePlan,
    manager: PluginManager,
    crew: Crew,
    base: Deployment,
    policies: dict[str, Deployment],
    card: TraceCard,
    capacity: int,
    notes: list[str],
    on_progress: Callable[[int, int], None],
) -> RouteReport:
    workers = base.pool[0].count

    def variant(name: str, deployment: Deployment, trees: int = plan.concurrency, **more: Any) -> Variant:
        return Variant(
            name, deployment, trees, seed=plan.seed, time_scale=plan.time_scale, gap_cap=plan.gap_cap, **more
        )

    names = list(policies)
    levels = [trees for trees in plan.ladder if trees != plan.concurrency]
    explained = set(plan.policies or [plan.deployment.gateway.router.use]) if plan.requests else set()
    first = [variant(POOL, pooled(base, manager), pool_of=workers)]
    first += [variant(n, policies[n], reasons=n in explained) for n in names]
    first += [variant(n, policies[n], trees) for trees in levels for n in names]
    searched = 2 * plan.rounds if workers > 1 else 0
    course = Course(card.turns, len(first) + searched, on_progress)
    seen = crew.run(first, course.note)
    runs = dict(zip(names, seen[1:], strict=False))
    tried: dict[str, Seen] = {}
    if not any(run.whole_run for run in runs.values()):
        raise BienError("; ".join(_faults(seen)))
    for number in range(searched // 2):
        best = _quickest({**runs, **tried})
        again = [
            variant(
                f"hindsight {number + 1}{side}",
                base,
                hindsight=Hindsight(best, capacity, number == 0 and side == "a", 2 * number + (side == "b")),
            )
            for side in "ab"
        ]
        tried |= {v.name: s for v, s in zip(again, crew.run(again, course.note), strict=True)}
    oracle = found(runs, tried)
    ideal = seen[0].hit
    reports = {name: policy_report(run, ideal, oracle) for name, run in runs.items()}
    for name in explained & set(reports):
        reports[name].costliest = costliest(runs[name], _quickest({**runs, **tried}), plan.requests)
    rest = iter(seen[1 + len(names) :])
    ladder = {trees: {name: trial(next(rest)) for name in names} for trees in levels}
    if plan.ladder:
        ladder[plan.concurrency] = {name: trial(run) for name, run in runs.items()}
    return RouteReport(
        trace=card,
        workers=workers,
        capacity=capacity,
        concurrency=plan.concurrency,
        time_scale=plan.time_scale,
        gap_cap=plan.gap_cap,
        seed=plan.seed,
        deployment=msgspec.to_builtins(msgspec.structs.replace(base, gateway=_public(plan.deployment))),
        costs=pool_costs(compose(base, manager)),
        ideal=ideal,
        oracle=oracle,
        policies=reports,
        best=best_of(reports),
        failed=_failed(seen),
        levels=[Level(trees, ladder[trees]) for trees in sorted(ladder)],
        notes=[*notes, *_faults(seen)],
    )


def _quickest(runs: dict[str, Seen]) -> Seen:
    return min((s for s in runs.values() if s.whole_run), key=lambda s: s.mean_ttft_ms)


def _faults(seen: Sequence[Seen]) -> list[str]:
    out = []
    for one in seen:
        if one.errors:
            often = max(one.errors, key=one.errors.__getitem__)
            out.append(f"{one.name}: {sum(one.errors.values())} turns failed, most often: {often[:200]}")
    return out


def _failed(seen: Sequence[Seen]) -> list[str]:
    """Names of the policies, in their order, some run of which has failed turns."""
    names = dict.fromkeys(one.name for one in seen if one.name != POOL and not one.whole_run)
    return list(names)


def _public(deployment: Deployment) -> Any:
    gateway = deployment.gateway
    return msgspec.structs.replace(gateway, secret="set" if gateway.secret else "")
