"""Engine overhead: CPU milliseconds per step in `begin` and `finish`, with N sequences decoding.

python -m bien.replay.bench.engine [--running 16] [--steps 2000]

No model runs; the executor answers at once. vLLM's scheduler (step minus executor) took 0.61 ms at 16
running sequences and 1.5 ms at 32 on a machine of this kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from bien.core.clock import WallClock
from bien.core.engine import Engine, EngineLimits
from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.plan import StepResult
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds


def measure(running: int, steps: int, prompt: int = 256) -> dict[str, Any]:
    """One run. Returns medians over the steps in which all sequences decode, in CPU milliseconds."""
    groups = (KVGroup("kv", GroupKind.FULL, tuple(range(30)), 16, bytes_per_token=23040),)
    blocks = (running * (prompt + steps + 64) // 16 + 64,)
    fcfs = PluginManager.load().find("scheduler", "fcfs").provider
    engine = Engine(
        scheduler=fcfs.factory(fcfs.config_type(token_budget=running * prompt + 1), Context()),
        cache=KVCache(groups, blocks, 16, running),
        groups=groups,
        limits=EngineLimits(running, prompt + steps + 64, 16, (0,)),
        clock=WallClock(),
    )
    for i in range(running):
        ids = TokenIds.of((j * 7 + i) % 40000 + 10 for j in range(prompt))
        engine.submit(GenerateRequest(f"r{i}", ids, SamplingParams(steps, temperature=0.0, seed=i)))
    times = []
    while engine.busy:
        before = time.process_time_ns()
        plan = engine.begin()
        middle = time.process_time_ns()
        assert plan is not None
        tokens = np.full(plan.rows, 123, dtype=np.int32)
        result = StepResult(plan.step, plan.samples, tokens)
        start = time.process_time_ns()
        engine.finish(result)
        end = time.process_time_ns()
        if plan.rows == running and plan.tokens == running:
            times.append((middle - before + end - start) / 1e6)
    engine.check_integrity()
    return {
        "running": running,
        "steps": len(times),
        "ms_per_step": round(statistics.median(times), 4),
        "p95_ms": round(statistics.quantiles(times, n=20)[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print(json.dumps(measure(args.running, args.steps)))


if __name__ == "__main__":
    main()
