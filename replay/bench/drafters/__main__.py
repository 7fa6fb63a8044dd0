"""Block drafters trained for a tiny target: how many drafts it takes, by real rejection sampling.

python -m bien.replay.bench.drafters [--seeds 3] [--target-steps 200] [--steps 150] [--contexts 300]
    [--rounds 6] [--threads 1] [--keep FOLDER] [--engine]

Per seed: a byte-level target of three layers learns the text of Python's standard library, then each drafter
of two layers (blocks of 7, states of the target's first two layers) learns from it. Judged behind 88 bytes of
held-out files; beside them what follows the longest match in a text's own end. tokens: gained per round, at
temperature 1 and greedy; positions: share taken of the drafts whose predecessors are; ECE: calibration error
of the chance that all drafts up to a position are taken, before and after temperatures that were fitted on
other texts. Budgets are steps; seconds are of CPU. --keep writes models that `bien` serves. --engine: what
the first seed's drafters reach in the engine, loaded by their plugins, for each way to verify their drafts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bien.core.speculation.options import SpeculationSpec
from bien.replay.bench.drafters.served import selection, serve
from bien.replay.bench.drafters.study import CONTEXT, MATCH, RECIPES, Budget, Row, Study, save, study
from bien.replay.bench.drafters.target import Progress, standard_library, windows

HEAD = f"{'':24}{'weights':>9}{'train s':>9}{'T=1':>6}{'T=0':>6}  {'ECE':13}  positions at T=1"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bien.replay.bench.drafters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = Budget()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target-steps", type=int, default=usual.target)
    parser.add_argument("--steps", type=int, default=usual.drafter)
    parser.add_argument("--contexts", type=int, default=usual.contexts)
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--engine", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    budget, text = Budget(args.target_steps, args.steps, args.contexts, args.rounds), standard_library()
    found: list[Study] = []
    for seed in range(args.seeds):
        found.append(study(seed, budget, text, told=partial(_told, seed)))
        print(f"\nseed {seed}: target at {statistics.mean(found[-1].losses[-20:]):.2f} nats per byte\n{HEAD}")
        for row in found[-1].rows:
            print(line(row))
        sys.stdout.flush()
        if args.keep is not None:
            save(found[-1], args.keep / f"seed-{seed}")
    print(f"\nmean of {args.seeds} seeds (least and most of T=1)\n{HEAD}")
    for i, name in enumerate((*RECIPES, MATCH)):
        rows = [s.rows[i] for s in found]
        warm = [row.warm for row in rows]
        print(line(mean(name, rows)), f" ({min(warm):.2f} to {max(warm):.2f})")
    if args.engine:
        engine(found[0], text[1], budget)


WAYS = {
    "standard": SpeculationSpec(verification="standard"),
    "block": SpeculationSpec(verification="block"),
    "invariant, gumbel": SpeculationSpec(noise="gumbel"),
    "invariant, quantile": SpeculationSpec(),
}


def engine(found: Study, held: Tensor, budget: Budget) -> None:
    """Print tokens per round by verification, for drafts that are drawn and for the likeliest ones."""
    contexts = windows(held, budget.contexts // 4, CONTEXT, torch.Generator().manual_seed(1000)).tolist()
    print(
        f"\nseed 0 in the engine, tokens per round at temperature 1\n{'':24}"
        + "".join(map("{:>22}".format, WAYS))
    )
    with tempfile.TemporaryDirectory() as name:
        save(found, Path(name))
        for drafter in found.drafters:
            for sampled in (True, False):
                lengths = []
                for spec in WAYS.values():
                    chosen = selection(found, drafter, Path(name), sampled=sampled)
                    served = serve(Path(name) / "target", chosen, spec, contexts, 4 * budget.rounds)
                    lengths.append(f"{served.length:22.2f}")
                kind = "drawn" if sampled else "likeliest"
                print(f"{drafter:24}" + "".join(lengths), f" {kind}", flush=True)


def line(row: Row) -> str:
    """Of the table."""
    error = "" if row.error is None else "{:.3f} > {:.3f}".format(*row.error)
    positions = " ".join(f"{p:.2f}"[1:] if p < 1 else f"{p:.1f}" for p in row.positions)
    numbers = f"{row.parameters:9,}{row.seconds:9.1f}{row.warm:6.2f}{row.cold:6.2f}"
    return f"{row.name:24}{numbers}  {error:13}  {positions}"


def mean(name: str, rows: list[Row]) -> Row:
    """Of several seeds."""
    errors = [row.error for row in rows if row.error is not None]
    error = None if not errors else tuple(statistics.mean(part) for part in zip(*errors, strict=True))
    return Row(
        name,
        statistics.mean(row.warm for row in rows),
        statistics.mean(row.cold for row in rows),
        [statistics.mean(part) for part in zip(*(row.positions for row in rows), strict=False)],
        rows[0].parameters,
        statistics.mean(row.seconds for row in rows),
        error=error,
    )


def _told(seed: int, what: str) -> Progress:
    def tell(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"seed {seed}, {what}: step {step}, loss {loss:.3f}", file=sys.stderr, flush=True)

    return tell


if __name__ == "__main__":
    main()
