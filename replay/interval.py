"""Intervals of a simulated result: the same run once faster and once slower, as far as the costs may be off.

What is uncertain of a cost model is mostly common to all steps (an efficiency that is not known, a machine
that is slower today), and queues make more of it than its share: so whole runs are repeated, not figures
scaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from bien.core.costs.calibrate import COVERED
from bien.core.deployment import Deployment, Selection
from bien.core.plugins import PluginManager
from bien.core.worker.apart import in_processes
from bien.replay.result import Result
from bien.replay.simulation import SimulationPlan, simulate

FIGURES = (
    *(
        f"{name}.{p}"
        for name in ("ttft_ms", "tpot_ms", "e2e_ms", "interactivity")
        for p in ("mean", "p50", "p90")
    ),
    "throughput.output",
    "throughput.logical",
    "throughput.per_accelerator.output",
    "cache.achieved",
    "jobs.per_hour",
)
"""What gets an interval, by its path in the result."""


def deviation(result: Result) -> float | None:
    """Of the logarithm of all steps' seconds, by the least certain pool. None: constants, which are given."""
    known = [costs.deviation for costs in result.costs if costs.deviation is not None]
    return max(known, default=None)


def paces(spread: float) -> tuple[float, float]:
    """Factors of all seconds between which `COVERED` of the truth lies."""
    reach = NormalDist().inv_cdf(0.5 + COVERED / 2) * spread
    return math.exp(-reach), math.exp(reach)


def paced(deployment: Deployment, pace: float) -> Deployment:
    """The deployment, its steps taking so many times as long."""
    pools = []
    for pool in deployment.pool:
        given = pool.executor.parameters
        selection = Selection(pool.executor.use, {**given, "pace": pace * given.get("pace", 1.0)})
        pools.append(msgspec.structs.replace(pool, executor=selection))
    return msgspec.structs.replace(deployment, pool=tuple(pools))


def find_intervals(plan: SimulationPlan, result: Result) -> dict[str, tuple[float, float]]:
    """Simulate twice more, in processes of their own; {} where nothing is said of the costs' certainty."""
    spread = deviation(result)
    if not spread:
        return {}
    plan = msgspec.structs.replace(plan, slowdown=False)
    plans = [msgspec.structs.replace(plan, deployment=paced(plan.deployment, pace)) for pace in paces(spread)]
    others = [other for _, other in in_processes(_run, plans, len(plans))]
    return between([result, *others])


def between(results: Sequence[Result]) -> dict[str, tuple[float, float]]:
    """The least and the most of each figure that all of them have."""
    out = {}
    for path in FIGURES:
        values = [v for r in results if (v := figure(r, path)) is not None]
        if len(values) == len(results):
            out[path] = (min(values), max(values))
    return out


def figure(result: Result, path: str) -> float | None:
    """The figure of a result at a dotted path."""
    found: object = result
    for name in path.split("."):
        found = getattr(found, name)
    return found if found is None else float(found)  # type: ignore[arg-type]


def _run(plan: SimulationPlan) -> Result:
    return simulate(plan, PluginManager.load()).result
