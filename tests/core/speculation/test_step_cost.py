from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.speculation.step_cost import FRESH, HALF_LIFE, StepCost

SIZES = np.arange(1.0, 600.0)


def learnt(steps: list[tuple[int, float]]) -> StepCost:
    cost = StepCost()
    for tokens, seconds in steps:
        cost.add(tokens, seconds)
    return cost


def test_knows_nothing_at_first() -> None:
    assert not StepCost().knows(4)
    assert (StepCost().seconds(SIZES) == 1).all()


def test_finds_the_curve_in_noise_with_outliers() -> None:
    """A hundredth of the steps take ten times as long: a pause of the machine says nothing of a size."""
    rng = random.Random(1)

    def truth(tokens: float) -> float:
        return 0.01 + 0.0002 * max(0.0, tokens - 64)

    steps = []
    for _ in range(3000):
        tokens = round(2 ** rng.uniform(0, 9))
        pause = 10 if rng.random() < 0.01 else 1
        steps.append((tokens, truth(tokens) * rng.uniform(0.95, 1.05) * pause))
    found = learnt(steps).seconds(SIZES[:512])
    wanted = np.array([truth(t) for t in SIZES[:512]])
    assert np.abs(found / wanted - 1).max() < 0.08


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(1e-6, 1e3)), min_size=1, max_size=60))
def test_is_monotone_and_positive_whatever_was_seen(steps: list[tuple[int, float]]) -> None:
    found = learnt(steps).seconds(SIZES)
    assert (found > 0).all()
    assert (np.diff(found) >= -1e-9 * found[1:]).all()


def test_goes_on_as_steeply_as_at_its_ends() -> None:
    cost = learnt([(t, 0.001 * t) for t in range(50, 200)])
    found = cost.seconds(SIZES)
    assert np.abs(found / (0.001 * SIZES) - 1).max() < 0.02
    flat = learnt([(t, 0.01) for t in range(50, 200)]).seconds(SIZES)
    assert np.allclose(flat, 0.01)


def test_below_what_was_seen_it_never_falls_faster_than_in_proportion() -> None:
    steep = learnt([(t, 0.001 * t**3) for t in range(50, 200)]).seconds(SIZES)
    assert (steep[:49] >= steep[49] * SIZES[:49] / 50 * 0.97).all()


def test_forgets() -> None:
    """Behind a change of the machine's speed the new one counts, at sizes that are seen too."""
    cost = learnt([(t, 1.0) for t in (4, 8, 16, 32) for _ in range(20)])
    for _ in range(FRESH):
        cost.add(8, 0.1)
    assert cost.seconds(np.array([8.0]))[0] == pytest.approx(0.1, rel=0.05)
    assert not cost.knows(32)
    assert cost.knows(8)
    for _ in range(20 * HALF_LIFE):
        cost.add(8, 0.1)
    assert cost.seconds(np.array([32.0]))[0] < 0.5, "what was seen so long ago is gone"


def test_steps_of_no_time_tell_nothing() -> None:
    cost = learnt([(0, 1.0), (5, 0.0), (5, float("nan")), (5, float("inf"))])
    assert not cost.knows(5)
