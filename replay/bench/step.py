"""Where a decoding step of the CPU executor spends its time, part by part.

python -m bien.replay.bench.step [--model smollm2-135m] [--quantizer none|int8|int4] [--kernels torch|native]
                                 [--batch 1,16] [--context 256] [--steps 40] [--threads 2]

Every linear product and kernel of the model is timed where the model calls it; "python between them" is what
is left of the forward pass. Wall-clock milliseconds per step, medians over `--steps`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bien.core.deployment import ModelSpec, PoolSpec, Selection
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.replay.bench.stack import build

KERNELS = {
    "paged_attention": "attention",
    "latent_attention": "attention",
    "write_kv": "attention",
    "rms_norm": "norms, rotation, activation",
    "add_rms_norm": "norms, rotation, activation",
    "rope": "norms, rotation, activation",
    "silu_mul": "norms, rotation, activation",
}


class Timers:
    """Seconds per part since `take` was last called."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)

    def around(self, part: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            value = act(*arguments, **keywords)
            self._spent[part] += time.perf_counter() - start
            return value

        return timed

    def take(self) -> dict[str, float]:
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent


class TimedLinear:
    """A `LinearMethod` that is timed."""

    def __init__(self, method: Any, run: Callable[..., Any]) -> None:
        self.out_features, self._run = method.out_features, run

    def __call__(self, x: Any) -> Any:
        return self._run(x)


def watch(model: Any, kernels: Any, timers: Timers) -> None:
    """Put timers around the model's products and the kernels it calls."""
    for name, part in KERNELS.items():
        setattr(kernels, name, timers.around(part, getattr(kernels, name)))
    seen: set[int] = set()

    def visit(node: Any) -> None:
        if id(node) in seen or not type(node).__module__.startswith("bien.core.models"):
            return
        seen.add(id(node))
        for name, value in list(vars(node).items()):
            if hasattr(value, "out_features"):
                part = "output head" if name == "output" else "linear products"
                setattr(node, name, TimedLinear(value, timers.around(part, value)))
            elif getattr(value, "__self__", None) is kernels:  # a kernel that the layer has bound
                setattr(node, name, getattr(kernels, value.__name__))
            for child in value if isinstance(value, list) else (value,):
                visit(child)

    visit(model)


def run(args: argparse.Namespace) -> dict[str, Any]:
    batches = [int(n) for n in args.batch.split(",")]
    most = max(batches)
    pool = PoolSpec(
        kv_tokens=most * (args.context + args.steps + 64),
        slots=most,
        threads=args.threads,
        quantizer=Selection(args.quantizer),
        kernels=Selection(args.kernels),
    )
    built = build(ModelSpec(args.model), pool)
    engine, executor = built.engine, built.executor
    timers = Timers()
    watch(executor.model, executor.kernels, timers)  # type: ignore[attr-defined]
    rng, shown = random.Random(0), {}
    for batch in batches:
        for i in range(batch):
            prompt = TokenIds.of(rng.randrange(100, 30000) for _ in range(args.context))
            sampling = SamplingParams(args.steps + 1, temperature=0.0, ignore_eos=True, seed=0)
            engine.submit(GenerateRequest(f"{batch}-{i}", prompt, sampling))
        steps: dict[str, list[float]] = defaultdict(list)
        while engine.busy:
            begin = time.perf_counter()
            plan = engine.begin()
            assert plan is not None
            ready = time.perf_counter()
            handle = executor.forward(plan)
            computed = time.perf_counter()
            result = executor.sample(handle).result()
            drawn = time.perf_counter()
            engine.finish(result)
            end = time.perf_counter()
            spent = timers.take()
            if plan.rows != batch or plan.tokens != batch:
                continue  # a prefill
            spent["python between them"] = computed - ready - sum(spent.values())
            spent["sampling"] = drawn - computed
            spent["engine"] = ready - begin + end - drawn
            spent["step"] = end - begin
            for part, seconds in spent.items():
                steps[part].append(seconds)
        shown[str(batch)] = {part: round(1e3 * statistics.median(v), 3) for part, v in steps.items()}
    built.close()
    return {"model": args.model, "quantizer": args.quantizer, "kernels": args.kernels, "ms_per_step": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantizer", default="none")
    parser.add_argument("--kernels", default="torch")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    print(json.dumps(run(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
