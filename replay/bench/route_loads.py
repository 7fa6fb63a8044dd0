"""Does a router lose to another at any load? p90 of TTFT over session trees at a time, simulated.

python -m bien.replay.bench.route_loads TRACE [--levels 2,4,8,12,16,24,32,40] [--sessions 40] [--seeds 3]
    [--router kv-aware] [--policy NAME ...] [--deployment fleet] [--capacity TOKENS] [--jobs 1] [--json FILE]

For each seed `--sessions` sessions are drawn from the trace, in an order of its own, and all policies play
the same ones; gaps are cut at a minute. Sessions that no worker can hold are left out. The table has medians
over seeds. A router loses where it is slower than another with every seed; where it is slower in the median
only, the difference is within the spread. Who takes more than twice its time with the first seed plays no
other, and is marked (1).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bien.core.plugins import PluginManager
from bien.replay.commands.deployment import composed
from bien.replay.files import pretty, write_whole
from bien.replay.route.crew import Alone, Crew, Processes
from bien.replay.route.explain import RoutePlan, prepared, sized
from bien.replay.route.load import fitting, read_sessions
from bien.replay.route.policies import chosen_policies
from bien.replay.route.variant import Variant

LEVELS = "2,4,8,12,16,24,32,40"
GAP_CAP = 60.0
FAR = 2.0  # times the router's p90: no seed is going to change that

Times = dict[int, dict[str, list[float]]]  # by session trees and policy: ms, one for each seed


class Loss(msgspec.Struct):
    """`router` was slower than `to` in the median; `always`: with every seed."""

    trees: int
    to: str
    by: float  # median over seeds of its p90 over the other's, less one
    always: bool


def measure(args: argparse.Namespace) -> Times:
    manager = PluginManager.load()
    deployment = composed(args.deployment).deployment
    plan = RoutePlan((args.trace,), deployment, capacity=args.capacity, seed=args.seeds).check()
    deployment, _ = prepared(plan)
    policies, _ = chosen_policies(args.policy or (), deployment, manager)
    every, card = read_sessions(plan.traces, None, manager)
    capacity = args.capacity or deployment.pool[0].kv_tokens or card.longest
    every, card = fitting(every, card, capacity, deployment.model.block_tokens, skip=True)
    policies = {name: sized(d, capacity, card) for name, d in policies.items()}
    found: Times = {trees: {name: [] for name in policies} for trees in args.levels}
    for seed in range(args.seeds):
        sessions = random.Random(seed).sample(every, min(args.sessions, len(every)))
        crew: Crew = Alone(sessions, manager) if args.jobs == 1 else Processes(sessions, args.jobs)
        try:
            for trees in args.levels:
                variants = [
                    Variant(name, policies[name], trees, seed=seed, gap_cap=GAP_CAP)
                    for name in _near(found[trees], args.router)
                ]
                for variant, seen in zip(variants, crew.run(variants, lambda *_: None), strict=True):
                    p90 = float(np.percentile(seen.ttft_ms, 90)) if seen.whole_run else float("inf")
                    found[trees][variant.name].append(p90)
                print(f"seed {seed}, {trees} trees: {found[trees]}", file=sys.stderr)
        finally:
            crew.close()
    return found


def _near(times: dict[str, list[float]], router: str) -> list[str]:
    ours = times.get(router)
    return [name for name, p90 in times.items() if not ours or p90[0] <= FAR * ours[0]]


def losses(times: Times, router: str) -> list[Loss]:
    """Where it is slower than another in the median, the worst first."""
    found = []
    for trees, policies in times.items():
        for name, theirs in policies.items():
            ratios = [a / b for a, b in zip(policies[router], theirs, strict=False)]
            if name != router and (median := statistics.median(ratios)) > 1:
                found.append(Loss(trees, name, median - 1, min(ratios) > 1))
    return sorted(found, key=lambda loss: -loss.by)


def table(times: Times) -> str:
    """Medians in ms, as Markdown; the best of each load in bold, (1): of the first seed only."""
    names = list(next(iter(times.values())))
    lines = ["| trees | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for trees, policies in times.items():
        medians = [statistics.median(policies[name]) for name in names]
        seeds = max(len(policies[name]) for name in names)
        cells = [f"**{ms:,.0f}**" if ms == min(medians) else f"{ms:,.0f}" for ms in medians]
        cells = [c if len(policies[n]) == seeds else f"{c} (1)" for c, n in zip(cells, names, strict=True)]
        lines.append(f"| {trees} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--levels", default=LEVELS, help="session trees at a time")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--router", default="kv-aware", help="the one that shall not lose")
    parser.add_argument("--policy", action="append", help="all that are installed if left out")
    parser.add_argument("--deployment", default="fleet")
    parser.add_argument("--capacity", type=int, help="KV tokens of a worker")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.levels = [int(n) for n in args.levels.split(",")]
    times = measure(args)
    behind = losses(times, args.router) if args.router in next(iter(times.values())) else []
    if args.json is not None:
        report: dict[str, Any] = {
            "router": args.router,
            "p90_ttft_ms": {str(trees): policies for trees, policies in times.items()},
            "slower": behind,
        }
        write_whole(args.json, pretty(report), "result")
    print(table(times))
    for loss in behind:
        how = "loses" if loss.always else "within the spread"
        print(f"{loss.trees} trees: {args.router} {how}, {loss.by:+.1%} against {loss.to}")
    if not any(loss.always for loss in behind):
        print(f"{args.router} loses nowhere")


if __name__ == "__main__":
    main()
