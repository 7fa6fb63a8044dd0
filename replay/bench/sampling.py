"""Sampling cost: CPU milliseconds for R rows of a vocabulary, greedy and filtered, peaked and flat.

python -m bien.replay.bench.sampling [--rows 16] [--vocab 49152] [--threads 1] [--rounds 50]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


CASES = {  # temperature, top_p, top_k, min_p
    "greedy_ms": (0.0, 1.0, 0, 0.0),
    "temperature_ms": (0.8, 1.0, 0, 0.0),
    "top_k50_ms": (0.8, 1.0, 50, 0.0),
    "top_p95_ms": (0.8, 0.95, 0, 0.0),
    "top_k50_p95_ms": (0.8, 0.95, 50, 0.0),
    "min_p05_ms": (0.8, 1.0, 0, 0.05),
}


def measure(rows: int, vocab: int, threads: int, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` of CPU milliseconds per call, fresh logits each time. The logits are normal
    with deviation 3; "flat": 1, so that top-p keeps most of them; "peaked": 3 with 20 likely tokens above
    them, as a model's are."""
    import torch

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(rows, vocab, generator=generator)

    peaks = torch.zeros(vocab)
    peaks[torch.randperm(vocab, generator=generator)[:20]] = torch.linspace(20, 5, 20)
    out: dict[str, Any] = {"rows": rows, "vocab": vocab, "threads": threads}
    out |= _medians(lambda: normal() * 3, rounds)
    out["flat"] = _medians(normal, rounds)
    out["peaked"] = _medians(lambda: normal() * 3 + peaks, rounds)
    return out


def _medians(make: Callable[[], Tensor], rounds: int) -> dict[str, float]:
    from bien.core.sampling.sampler import sample_rows

    out = {}
    for name, (temperature, top_p, top_k, min_p) in CASES.items():
        times = []
        for _ in range(rounds):
            logits = make()
            each = np.ones(len(logits))
            numbers = np.arange(len(logits))
            keep = np.full(len(logits), top_k)
            start = time.process_time()
            sample_rows(logits, numbers, numbers, each * temperature, each * top_p, keep, each * min_p)
            times.append((time.process_time() - start) * 1e3)
        out[name] = round(statistics.median(times), 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    print(json.dumps(measure(args.rows, args.vocab, args.threads, args.rounds)))


if __name__ == "__main__":
    main()
