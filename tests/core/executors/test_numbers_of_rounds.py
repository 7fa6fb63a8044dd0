"""Drafts as they are drawn, judged as executors judge them: the numbers of a round are independent of each
other, and of those of other answers to the same prompt.

The exact law of the rules is tested elsewhere (core/testing/law.py). It holds only where coins and draws are
independent, which no enumeration sees. So these draw, many times, with drafts that are far from the target's
law: shares that are off by less than four standard deviations pass.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bien.core.executors import verification
from bien.core.executors.verification import Verification
from bien.core.sampling import sampler
from bien.core.sampling.rng import uniforms
from bien.core.speculation import drawer as drawers
from bien.core.speculation.drawer import RoundDrawer
from bien.core.speculation.options import SpeculationSpec

TARGET = np.array([0.3, 0.3, 0.4])
DRAFTER = np.array([0.8, 0.1, 0.1])
SEEDS, ANSWERS, PROMPT, DRAFTS = 1200, 2, 4, 2
ROWS = SEEDS * ANSWERS
RULES = ["standard", "block"]
F64, I64 = NDArray[np.float64], NDArray[Any]


@cache
def rounds(rule: str) -> list[list[int]]:
    """Of every seed and answer one, at many positions."""
    seeds, choices = np.repeat(np.arange(SEEDS), ANSWERS), np.tile(np.arange(ANSWERS), SEEDS)
    return played(rule, seeds, choices, seeds % 50)


def played(rule: Any, seeds: I64, choices: I64, at: I64) -> list[list[int]]:
    """What rounds yield that draft from `at` on, counted from the prompt's end."""
    spec, many, heat = SpeculationSpec(verification=rule), len(seeds), np.ones(len(seeds))
    seeds, choices = seeds.astype(np.uint64), choices.astype(np.uint64)
    drawer = RoundDrawer(spec, False, seeds, choices, heat, at)
    logits = torch.from_numpy(np.log(DRAFTER)).expand(many, -1)
    drafts = np.stack([drawer.draw(logits).numpy() for _ in range(DRAFTS)], 1)

    slots, known = np.arange(many), at + PROMPT
    tokens = np.zeros((many, 64), np.int64)
    for j in range(DRAFTS):
        tokens[slots, known + j] = drafts[:, j]
    places = (known[:, None] - 1 + np.arange(1 + DRAFTS)).ravel()
    each = np.full(many, 1 + DRAFTS)
    plan: Any = SimpleNamespace(
        slots=slots, starts=known - 1, counts=each, drafts=each - 1, samples=each * 0 + 1, rows=many
    )
    offsets = np.arange(many + 1) * (1 + DRAFTS)
    rows: Any = SimpleNamespace(host_positions=places, host_places=places, offsets=offsets, trees={})
    state: Any = SimpleNamespace(
        tokens=tokens, seeds=seeds, choices=choices, temperature=heat, top_p=heat, top_k=slots * 0,
        min_p=heat * 0, prompts=slots * 0 + PROMPT, adjustments={}, forced_tokens=lambda *_: None,
    )  # fmt: skip
    laws = {i: drawer.laws(i) or [] for i in range(many)}
    target = torch.from_numpy(np.log(TARGET)).expand(len(places), -1)
    judged = Verification(plan, rows, target, np.arange(len(places)), state, spec, laws).judge(None)
    ends = np.cumsum(judged.accepted)
    return [judged.tokens[end - n : end].tolist() for end, n in zip(ends, judged.accepted, strict=True)]


def like(shares: F64, want: F64, many: int) -> None:
    off = np.abs(shares / many - want) / np.sqrt(want * (1 - want) / many)
    assert off.max() < 4, f"{np.round(shares / many, 3).tolist()} instead of {want.tolist()}"


@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_targets_law(rule: str) -> None:
    """Of two tokens; where a round yields one only, the target alone yields the other."""
    shares = np.zeros((3, 3))
    for text in rounds(rule):
        shares[text[0]] += TARGET if len(text) == 1 else np.eye(3)[text[1]]
    like(shares.sum(1), TARGET, ROWS)
    like(shares, np.outer(TARGET, TARGET), ROWS)
    lengths = np.bincount([len(text) for text in rounds(rule)])
    assert lengths[1:].min() > ROWS / 20


@pytest.mark.parametrize("rule", RULES)
def test_answers_of_one_seed_are_independent(rule: str) -> None:
    texts, shares = rounds(rule), np.zeros((3, 3))
    for a, b in zip(texts[::2], texts[1::2], strict=True):
        shares[a[0], b[0]] += 1
    like(shares, np.outer(TARGET, TARGET), SEEDS)


def test_no_number_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of those that the target's own tokens have, in this round, a later one, or another answer."""
    used: list[tuple[int, ...]] = []

    def kept(seeds: Any, positions: Any, *, choice: Any = 0, purpose: int = 0, index: int = 0) -> Any:
        each = np.broadcast_arrays(seeds, positions, choice, purpose, index)
        used.extend(zip(*(np.ravel(values).tolist() for values in each), strict=True))
        return uniforms(seeds, positions, choice=choice, purpose=purpose, index=index)

    for module in (verification, sampler, drawers):
        monkeypatch.setattr(module, "uniforms", kept)
    at = np.arange(0, 60, 1 + DRAFTS)
    for seed in range(2):
        for choice in range(2):
            played("standard", at * 0 + seed, at * 0 + choice, at)
    assert len(used) == 4 * len(at) * (DRAFTS + (1 + DRAFTS) + DRAFTS + 1)
    assert len(set(used)) == len(used)
