"""SmolLM2-135M in fp32 against transformers, in one run: single stream, 16 at once, shared prefix.

python -m bien.replay.bench.decode [--threads 2] [--rounds 3] [--model FOLDER]

Medians of `--rounds` alternating rounds. Both sides get the same ids and produce the same number of
tokens (greedy, end-of-text ignored). transformers' batch is the left-padding-free best case: all prompts
have one length.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from bien.core.clock import WallClock
from bien.core.deployment import ModelSpec, PoolSpec, Selection
from bien.core.engine import Engine
from bien.core.executors.base import Executor
from bien.core.request import GenerateRequest, SamplingParams, TokenIds

Prompts = list[list[int]]


class Bien:
    """The engine and the torch executor, driven directly."""

    def __init__(self, model: str, threads: int) -> None:
        from bien.replay.bench.stack import build

        pool = PoolSpec(
            kv_tokens=16 * 1024,
            slots=16,
            threads=threads,
            scheduler=Selection("fcfs", {"token_budget": 1024}),
        )
        built = build(ModelSpec(model), pool)
        self.engine: Engine = built.engine
        self.executor: Executor = built.executor
        self._count = 0

    def generate(self, prompts: Prompts, count: int) -> tuple[list[list[int]], float]:
        """Tokens per prompt, and seconds until the first token of the first prompt."""
        clock = WallClock()
        out: dict[str, list[int]] = {}
        start = clock.time()
        first = -1.0
        for prompt in prompts:
            self._count += 1
            id = str(self._count)
            out[id] = []
            sampling = SamplingParams(count, temperature=0.0, ignore_eos=True, seed=0)
            self.engine.submit(GenerateRequest(id, TokenIds.of(prompt), sampling))
        while self.engine.busy:
            plan = self.engine.begin()
            assert plan is not None
            result = self.executor.sample(self.executor.forward(plan)).result()
            for o in self.engine.finish(result).outputs:
                if first < 0 and o.count:
                    first = clock.time() - start
                out[o.id] += memoryview(o.tokens).cast("I")
        return list(out.values()), first


class Transformers:
    """`generate` of the reference library, greedy."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompts: Prompts, count: int) -> list[list[int]]:
        torch = self._torch
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [row[len(prompts[0]) :].tolist() for row in made]


def timed(act: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    value = act(*arguments)
    return time.perf_counter() - start, value


def run(model: str, threads: int, rounds: int) -> dict[str, Any]:
    from bien.core.models.fetch import resolve_model

    folder = str(resolve_model(model))
    bien, peer = Bien(folder, threads), Transformers(folder, threads)
    rng = random.Random(0)

    def text(n: int) -> list[int]:
        return [rng.randrange(100, 49000) for _ in range(n)]

    bien.generate([text(32)], 4)
    peer.generate([text(32)], 4)
    single, batched, serial, prefix, same = [], [], [], [], []
    for _ in range(rounds):
        prompt = [text(32)]
        ours, (mine, _) = timed(bien.generate, prompt, 128)
        theirs, other = timed(peer.generate, prompt, 128)
        single.append(theirs / ours)
        same.append(mine == other)
        prompts = [text(256) for _ in range(16)]
        ours, _ = timed(bien.generate, prompts, 64)
        theirs, _ = timed(peer.generate, prompts, 64)
        one, _ = timed(lambda prompts: [peer.generate([p], 64) for p in prompts], prompts[:4])
        batched.append(theirs / ours)
        serial.append(one * 4 / ours)  # four of sixteen, times four
        shared = text(2000)
        first, ttft1 = bien.generate([shared], 4)
        _, ttft2 = bien.generate([shared + first[0] + text(20)], 4)
        prefix.append(ttft2 / ttft1)
    return {
        "threads": threads,
        "rounds": rounds,
        "greedy_equal": f"{sum(same)}/{len(same)}",
        "single_stream_x": round(statistics.median(single), 2),
        "batch16_vs_batched_generate_x": round(statistics.median(batched), 2),
        "batch16_vs_one_by_one_x": round(statistics.median(serial), 2),
        "second_turn_ttft_ratio": round(statistics.median(prefix), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    print(json.dumps(run(args.model, args.threads, args.rounds)))


if __name__ == "__main__":
    main()
