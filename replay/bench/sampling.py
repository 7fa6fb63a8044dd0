"""Sampling cost: milliseconds for R rows of a vocabulary, greedy and filtered.

python -m bien.replay.bench.sampling [--rows 16] [--vocab 49152] [--threads 2] [--rounds 50]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np


def measure(rows: int, vocab: int, threads: int, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` of wall milliseconds per call, fresh logits each time."""
    import torch

    from bien.core.sampling.sampler import sample_rows

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    seeds = np.arange(rows, dtype=np.int64)
    positions = np.arange(rows, dtype=np.int64)
    cases = {
        "greedy_ms": (0.0, 1.0, 0),
        "temperature_ms": (0.8, 1.0, 0),
        "top_k50_ms": (0.8, 1.0, 50),
        "top_p95_ms": (0.8, 0.95, 0),
    }
    out: dict[str, Any] = {"rows": rows, "vocab": vocab, "threads": threads}
    for name, (temperature, top_p, top_k) in cases.items():
        heat, nucleus = np.full(rows, temperature), np.full(rows, top_p)
        keep = np.full(rows, top_k, dtype=np.int64)
        times = []
        for _ in range(rounds):
            logits = torch.randn(rows, vocab, generator=generator) * 3
            start = time.perf_counter()
            sample_rows(logits, seeds, positions, heat, nucleus, keep)
            times.append((time.perf_counter() - start) * 1e3)
        out[name] = round(statistics.median(times), 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    print(json.dumps(measure(args.rows, args.vocab, args.threads, args.rounds)))


if __name__ == "__main__":
    main()
