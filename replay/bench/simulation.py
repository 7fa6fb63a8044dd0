"""Simulated requests per second of CPU, on a Weka trace at full size (no token materialised).

python -m bien.replay.bench.simulation TRACE [--concurrency 8] [--deployment simulated] [--rounds 3]

TRACE is read inside the measured time. Median of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from bien.core.deployment import load_deployment
from bien.core.plugins import PluginManager
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.options import ReplayOptions
from bien.replay.simulation import SimulationPlan, simulate


def measure(trace: Path, deployment: str, concurrency: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of whole simulations, start-up of the interpreter left out."""
    manager = PluginManager.load()
    options = ReplayOptions(concurrency=concurrency, gap_cap=60.0)
    plan = SimulationPlan((trace,), options, load_deployment(deployment, [EXAMPLES]))
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
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--deployment", default="simulated")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(measure(args.trace, args.deployment, args.concurrency, args.rounds)))


if __name__ == "__main__":
    main()
