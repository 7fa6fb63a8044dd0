"""What drafters draw: by which noise, from what law, over which tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bien.core.sampling.sampler import sample_rows
from bien.core.speculation.drawer import RoundDrawer
from bien.core.speculation.options import SpeculationSpec

VOCAB, MANY = 40, 50
LOGITS = torch.randn(MANY, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
SEEDS = np.arange(MANY, dtype=np.uint64) * 7
HEAT = np.where(np.arange(MANY) % 5, 0.8, 0.0)


def drawer(rule: Any = "invariant", noise: Any = "quantile", deterministic: bool = False, at: int = 0) -> Any:
    spec = SpeculationSpec(verification=rule, noise=noise)
    choices = np.zeros(MANY, np.uint64)
    return RoundDrawer(spec, deterministic, SEEDS, choices, HEAT, np.arange(MANY) + at)


def target(noise: Any, ahead: int = 0) -> torch.Tensor:
    off = np.ones(MANY), np.zeros(MANY, np.int64)
    return sample_rows(LOGITS, SEEDS, np.arange(MANY) + ahead, HEAT, *off, noise=noise)


@pytest.mark.parametrize("noise", ["quantile", "gumbel"])
def test_a_drafter_of_the_targets_law_draws_the_targets_tokens(noise: str) -> None:
    """Call by call the token of the next position; greedy sequences take the largest."""
    found = drawer(noise=noise)
    for ahead in range(3):
        assert torch.equal(found.draw(LOGITS), target(noise, ahead))
    assert not torch.equal(target(noise), target(noise, 1))


@pytest.mark.parametrize("noise", ["quantile", "gumbel"])
@pytest.mark.parametrize("each", [False, True])
def test_candidates_in_any_order_are_the_same_tokens(noise: str, each: bool) -> None:
    """A smaller vocabulary, or candidates of each sequence: the draw is that over all tokens of which the
    others have no chance."""
    rng = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(VOCAB, generator=rng)[:9] for _ in range(MANY)])
    ids = ids if each else ids[0]
    wide = ids.expand(MANY, -1)
    logits = LOGITS.gather(1, wide)
    whole = torch.full_like(LOGITS, float("-inf")).scatter(1, wide, logits)
    assert torch.equal(drawer(noise=noise).draw(logits, ids), drawer(noise=noise).draw(whole))
    tested = drawer("block", noise)
    tokens = tested.draw(logits, ids)
    laws = [tested.laws(i) for i in range(MANY)]
    for i in range(MANY):
        if HEAT[i] == 0:
            assert laws[i] is None and int(tokens[i]) == int(whole[i].argmax())
            continue
        (law,) = laws[i]
        exact = torch.softmax(whole[i].double() / HEAT[i], -1)
        assert torch.allclose(law.dense(VOCAB), exact, atol=1e-6)


def test_tested_drafts_have_the_rounds_own_noise() -> None:
    """Nothing that a rejection test has looked at is used for another round, nor for the target."""
    first, later = drawer("block"), drawer("block", at=1)
    a, b = first.draw(LOGITS), first.draw(LOGITS)
    assert torch.equal(drawer("block").draw(LOGITS), a)
    warm = torch.from_numpy(HEAT > 0)
    for other in (b, later.draw(LOGITS), target("quantile")):
        assert not torch.equal(a[warm], other[warm])


def test_drafts_follow_their_law() -> None:
    rows = 20_000
    law = torch.tensor([0.5, 0.3, 0.2, 0.0])
    spec = SpeculationSpec(verification="standard")
    seeds, zeros = np.arange(rows, dtype=np.uint64), np.zeros(rows, np.uint64)
    found = RoundDrawer(spec, False, seeds, zeros, np.ones(rows), np.zeros(rows, np.int64))
    share = np.bincount(found.draw(law.log().expand(rows, -1)).numpy(), minlength=4) / rows
    np.testing.assert_allclose(share, law, atol=0.015)
    assert share[3] == 0


def test_deterministic_drafters_take_the_largest() -> None:
    found = drawer("standard", deterministic=True)
    assert torch.equal(found.draw(LOGITS), LOGITS.argmax(-1))
    assert found.laws(1) is None and not found.draws
