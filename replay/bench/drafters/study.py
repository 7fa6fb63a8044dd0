"""One seed's study: a tiny target, drafters trained for it, how many of their drafts it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from bien.replay.bench.drafters.acceptance import Propose, Rounds, drafted, matched, speculate
from bien.replay.bench.drafters.calibration import calibration_error, fit_temperatures, scaled
from bien.replay.bench.drafters.network import Drafter
from bien.replay.bench.drafters.target import Progress, Target, train_target, windows
from bien.replay.bench.drafters.training import CE_ONLY, DISTANCE, SPARK, Recipe, train_drafter

CONTEXT = 88  # bytes before the first round
RECIPES: dict[str, tuple[int, Recipe]] = {  # rank of the Markov head, loss
    "DFlash, cross-entropy": (0, CE_ONLY),
    "DFlash, 0.1 CE + 0.9 TV": (0, DISTANCE),
    "DSpark": (64, SPARK),
}
MATCH = "longest match"
Told = Callable[[str], Progress]
"""Of what is trained: whom to tell each step."""


@dataclass(frozen=True)
class Budget:
    """In steps, not in time: a loaded machine takes several times as long for the same result."""

    target: int = 200
    drafter: int = 150
    contexts: int = 300
    rounds: int = 6


@dataclass
class Row:
    """Of one drafter."""

    name: str
    warm: float  # tokens per round at temperature 1
    cold: float  # greedy
    positions: list[float]  # taken, of those whose predecessors are, at temperature 1
    parameters: int = 0
    seconds: float = 0.0  # of CPU, to train it
    losses: list[float] = field(default_factory=list)
    error: tuple[float, float] | None = None  # of the confidences, before and after calibration
    temperatures: list[float] = field(default_factory=list)


@dataclass
class Study:
    target: Target
    drafters: dict[str, Drafter]
    rows: list[Row]
    losses: list[float]  # of the target
    seconds: float


def quiet(name: str) -> Progress:
    """Tells nobody."""
    return lambda step, loss: None


def study(
    seed: int,
    budget: Budget,
    text: tuple[Tensor, Tensor],
    names: tuple[str, ...] = (*RECIPES, MATCH),
    told: Told = quiet,
) -> Study:
    """`text`: to train on, and held out. `names`: of `RECIPES`, or `MATCH`."""
    train, held = text
    target, began = Target(seed=seed), time.process_time()
    losses = train_target(target, train, budget.target, seed, told("target"))
    found = Study(target.requires_grad_(False), {}, [], losses, time.process_time() - began)
    contexts = windows(held, budget.contexts, CONTEXT, torch.Generator().manual_seed(seed + 1000))
    for name in names:
        if name == MATCH:
            found.rows.append(_row(name, target, lambda heat: matched(), contexts, budget.rounds)[0])
            continue
        rank, recipe = RECIPES[name]
        drafter, began = Drafter(target, rank=rank, seed=seed + 1), time.process_time()
        losses = train_drafter(drafter, target, train, recipe, budget.drafter, seed + 2, told(name))
        seconds = time.process_time() - began
        drafter.requires_grad_(False)
        row, rounds = _row(name, target, partial(drafted, drafter), contexts, budget.rounds)
        row.parameters = sum(w.numel() for w in drafter.parameters())
        row.seconds, row.losses = seconds, losses
        if rounds.chance:
            row.error, row.temperatures = calibrated(rounds, budget.contexts)
        found.rows.append(row)
        found.drafters[name] = drafter
    return found


def calibrated(rounds: Rounds, contexts: int) -> tuple[tuple[float, float], list[float]]:
    """Temperatures fitted on the first half of the texts; the error on the other half, before and after."""
    chance = torch.stack(rounds.chance, 1).double().numpy()  # [texts, rounds, drafts]
    taken = torch.stack(rounds.taken, 1).numpy()
    half = contexts // 2
    fit, test = (
        (chance[part].reshape(-1, chance.shape[2]), taken[part].ravel())
        for part in (slice(0, half), slice(half, None))
    )
    temperatures = fit_temperatures(*fit)
    after = scaled(test[0], np.array(temperatures))
    return (calibration_error(*test), calibration_error(after, test[1])), temperatures


def save(found: Study, folder: Path) -> None:
    """The target, and each drafter with its calibration, as folders that bien loads."""
    found.target.save(folder / "target")
    for row in found.rows:
        if row.name in found.drafters:
            where = found.drafters[row.name].save(folder / slug(row.name))
            if row.temperatures:
                told = {"temperatures": row.temperatures, "error": row.error}
                (where / "calibration.json").write_bytes(msgspec.json.encode(told))


def slug(name: str) -> str:
    """A folder's name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower().replace(", ", "-").replace(" + ", "-"))


def _row(
    name: str, target: Target, proposing: Callable[[float], Propose], contexts: Tensor, rounds: int
) -> tuple[Row, Rounds]:
    cold = speculate(target, proposing(0.0), contexts, rounds, 1, temperature=0.0)
    warm = speculate(target, proposing(1.0), contexts, rounds, 1)
    return Row(name, warm.length, cold.length, warm.by_position()), warm
