"""A small mixture of experts in fp32 against transformers: what a token costs is its chosen experts.

python -m bien.replay.bench.moe [--threads 2] [--rounds 5] [--layers 4] [--experts 32] [--implementation NAME]

A Qwen3-MoE of hidden size 768 with experts of 512, four of them per token, is written with random weights.
Medians of `--rounds` alternating rounds of single-stream decoding, 16 sequences at once, and a prompt of 512
tokens; every ratio is transformers' time through ours, by the wall clock and by CPU time, which other
load on the machine disturbs less. Then the same decoding by a model of twice as many experts: were the whole
model read for a token, it would take twice as long.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bien.replay.bench.decode import Bien, Transformers

VOCABULARY = 8192
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "head_dim": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def write(folder: Path, layers: int, experts: int) -> dict[str, int]:
    """The model with its tokenizer; its parameters, total and active."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from bien.core.architectures.registry import read_architecture
    from bien.core.testing.toy import write_tokenizer

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**CONFIG, num_hidden_layers=layers, num_experts=experts)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    a = read_architecture(folder, 16, "float32")
    return {"total": a.parameters, "active": a.active_parameters}


def timed(act: Callable[..., Any], *arguments: Any) -> tuple[float, float, Any]:
    """(seconds by the clock, seconds of the processor, what `act` returns)."""
    start, spent = time.perf_counter(), time.process_time()
    value = act(*arguments)
    return time.perf_counter() - start, time.process_time() - spent, value


class Ratios:
    """Medians of ratios of two times, by the clock and by the processor."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def add(self, ours: tuple[float, float, Any], theirs: tuple[float, float, Any]) -> None:
        self._wall.append(theirs[0] / ours[0])
        self._cpu.append(theirs[1] / ours[1])

    def shown(self) -> dict[str, float]:
        return {
            "wall": round(statistics.median(self._wall), 2),
            "cpu": round(statistics.median(self._cpu), 2),
        }


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def against_transformers(folder: str, threads: int, rounds: int, implementation: str) -> dict[str, Any]:
    bien, peer = Bien(folder, threads), Transformers(folder, threads)
    if implementation:
        peer.model.set_experts_implementation(implementation)
    rng = random.Random(0)
    work = {"single_stream": (1, 32, 64), "batch16": (16, 64, 24), "prompt512": (1, 512, 1)}
    ratios = {name: Ratios() for name in work}
    same = []
    for round_ in range(-1, rounds):  # the first warms up
        for name, (count, length, tokens) in work.items():
            prompts = [text(rng, length) for _ in range(count)]
            ours, theirs = timed(bien.generate, prompts, tokens), timed(peer.generate, prompts, tokens)
            same.append(ours[2][0] == theirs[2])
            if round_ >= 0:
                ratios[name].add(ours, theirs)
    found: dict[str, Any] = {f"{name}_x": r.shown() for name, r in ratios.items()}
    return {"greedy_equal": f"{sum(same)}/{len(same)}", **found}


def twice(folders: tuple[str, str], threads: int, rounds: int) -> dict[str, float]:
    """How much longer a token takes with the second model."""
    one, two = (Bien(folder, threads) for folder in folders)
    rng, ratios = random.Random(1), Ratios()
    for round_ in range(-1, rounds):
        prompts = [text(rng, 32)]
        times = timed(one.generate, prompts, 64), timed(two.generate, prompts, 64)
        if round_ >= 0:
            ratios.add(*times)
    return ratios.shown()


def run(threads: int, rounds: int, layers: int, experts: int, implementation: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base:
        folder, wider = Path(base) / "model", Path(base) / "wider"
        sizes = write(folder, layers, experts)
        compared = against_transformers(str(folder), threads, rounds, implementation)
        write(wider, layers, 2 * experts)
        gc.collect()
        longer = twice((str(folder), str(wider)), threads, rounds)
    return {
        "threads": threads,
        "rounds": rounds,
        "parameters": sizes,
        **compared,
        "twice_the_experts_takes": longer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--implementation", default="", help="of transformers' experts; default: its own")
    args = parser.parse_args()
    print(json.dumps(run(args.threads, args.rounds, args.layers, args.experts, args.implementation)))


if __name__ == "__main__":
    main()
