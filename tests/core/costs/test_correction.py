"""What factors leave over: learnt where it is smooth, nothing elsewhere, the same step by step and jumped."""

from __future__ import annotations

import numpy as np
import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.costs.correction import Correction, correct, factors, octaves
from bien.core.costs.machine import load_machine
from bien.core.costs.step import StepModel


def places(rng: np.random.Generator, n: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.stack([rng.uniform(0, 6, n), rng.uniform(0, 9, n), rng.uniform(4, 13, n)], axis=1)


def test_a_bump_is_learnt_and_falls_off() -> None:
    rng = np.random.default_rng(0)

    def truth(at: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return np.asarray(-0.4 * np.exp(-np.square(at[:, 0] - 4) / 2))

    known, other = places(rng, 60), places(rng, 200)
    found = correct(known, truth(known), [1] * 60)
    said = np.log(factors(*found.arrays(), other / np.array(found.lengths)))
    assert np.abs(said - truth(other)).max() < 0.15 and np.abs(truth(other)).max() > 0.35
    far = np.array([[40.0, 40.0, 40.0]]) / np.array(found.lengths)
    assert factors(*found.arrays(), far)[0] == pytest.approx(1.0)


def test_of_pure_noise_nothing_is_learnt() -> None:
    rng = np.random.default_rng(1)
    found = correct(places(rng, 40), 0.02 * rng.standard_normal(40), [1] * 40)
    other = places(rng, 100)
    said = np.log(factors(*found.arrays(), other / np.array(found.lengths)))
    assert np.abs(said).mean() < 0.01


def test_steps_that_follow_each_other_cost_what_each_costs() -> None:
    a, machine = read_architecture("llama-3.1-8b", 64, "bfloat16"), load_machine("h100")
    correction = Correction((1.0, 2.0, 2.0), [(3.0, 0.0, 9.0), (2.0, 0.0, 11.0)], [0.3, -0.2])
    more = {"cache_read": 0.4, "cache_computed": 0.3}
    model = StepModel(a, machine, factors=more, correction=correction)
    starts = np.array([100, 600, 1700, 4000, 77, 900, 500, 31])
    jumped = model.growing(starts, 8, 50)
    stepped = [model.seconds(starts + k, np.ones(8, dtype=int), 8) for k in range(50)]
    np.testing.assert_allclose(jumped, stepped, rtol=1e-12)
    plain = StepModel(a, machine, factors=more)
    assert abs(jumped[0] / plain.growing(starts, 8, 1)[0] - 1) > 0.05


def test_octaves_of_a_step() -> None:
    np.testing.assert_allclose(octaves(8, 8, np.array([256.0])), [[3.0, 0.0, 8.0]])
    np.testing.assert_allclose(octaves(1, 512, np.array([256.5])), [[0.0, 9.0, np.log2(256.5)]])
