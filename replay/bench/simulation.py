"""Simulated requests per second of CPU, on a trace at full size (no token materialised).

python -m bien.replay.bench.simulation TRACE [--workers 8] [--concurrency N] [--deployment D] [--rounds 1]

A trace with starting times is played open loop unless --concurrency is given, any other one with 8
session trees at a time and gaps of at most a minute. TRACE is read inside the measured time. Median of
`--rounds`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from bien.core.deployment import load_deployment
from bien.core.plugins import PluginManager
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.options import ReplayOptions
from bien.replay.simulation import SimulationPlan, simulate, with_workers
from bien.replay.traces import Survey, open_paths


def measure(
    trace: Path, deployment: str, workers: int | None, concurrency: int | None, rounds: int
) -> dict[str, Any]:
    """CPU seconds of whole simulations, start-up of the interpreter left out."""
    manager = PluginManager.load()
    options = ReplayOptions(open_loop=None if concurrency is None else False)
    survey = Survey(open_paths((trace,), manager), msgspec.structs.replace(options, sessions=1))
    survey.check()
    options = survey.settled(options)
    if not options.open_loop:
        options = msgspec.structs.replace(options, concurrency=concurrency or 8, gap_cap=60.0)
    chosen = load_deployment(deployment, [EXAMPLES])
    if workers is not None:
        chosen = with_workers(chosen, workers)
    plan = SimulationPlan((trace,), options, chosen)
    rates = []
    for _ in range(rounds):
        start = time.process_time()
        result = simulate(plan, manager).result
        rates.append(result.turns.count / (time.process_time() - start))
    return {
        "requests": result.turns.count,
        "errors": result.turns.errors,
        "mean_prompt_tokens": round(result.tokens.logical_input / result.turns.count),
        "requests_per_cpu_second": round(statistics.median(rates)),
        "cpu_seconds": round(statistics.median(result.turns.count / rate for rate in rates), 1),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--deployment", default="simulated")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(measure(args.trace, args.deployment, args.workers, args.concurrency, args.rounds)))


if __name__ == "__main__":
    main()
