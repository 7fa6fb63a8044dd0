"""Factors of a cost model from observations: known ones come back, too little is refused with the numbers."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.costs.fit import FEWEST, fit
from bien.core.costs.formats import Formats
from bien.core.costs.machine import load_machine
from bien.core.costs.observed import Observed, Step
from bien.core.costs.step import StepModel
from bien.core.errors import UserError

PLAIN = StepModel(
    read_architecture("llama-3.1-8b", 64, "bfloat16"), load_machine("h100"), formats=Formats("fp8", kv="bf16")
)
TRUTH = {"products": 1.7, "attention": 2.5, "head": 1.2, "launches": 3.0, "host": 4.0, "rows": 6.0}


def step(rng: np.random.Generator) -> Step:
    """Decodes, chunks, or both."""
    rows = int(2 ** rng.uniform(0, 6))
    starts = (2 ** rng.uniform(4, 14, rows)).astype(int)
    counts = np.ones(rows, dtype=int)
    if rng.random() < 0.5:
        counts[: int(rng.integers(1, min(rows, 3) + 1))] = int(2 ** rng.uniform(3, 11))
    return Step(tuple(starts.tolist()), tuple(counts.tolist()), rows)


def observe(model: StepModel, count: int, seed: int, noise: float = 0.0) -> list[Observed]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        s = step(rng)
        seconds = model.seconds(np.array(s.starts), np.array(s.counts), s.samples)
        out.append(Observed(seconds * float(np.exp(noise * rng.standard_normal())), (s,), f"{seed}/{i}"))
    return out


def test_an_engine_of_known_factors_is_predicted_where_it_was_not_observed() -> None:
    truth = StepModel(PLAIN.a, PLAIN.machine, PLAIN.layout, PLAIN.formats, TRUTH)
    found = fit(PLAIN, observe(truth, 48, seed=1, noise=0.03))
    calibrated = found.model(PLAIN)
    rest = observe(truth, 200, seed=2)
    off = np.array([found.seconds(calibrated, o) / o.seconds - 1 for o in rest])
    assert np.median(np.abs(off)) < 0.03
    plain = np.array([PLAIN.seconds(*_arrays(o)) / o.seconds - 1 for o in rest])
    assert np.median(np.abs(plain)) > 0.3  # what it is worth


def test_the_way_of_requests_is_told_from_their_steps() -> None:
    steps = observe(PLAIN, 40, seed=3)
    ways = [
        Observed(0.004 + 2e-6 * n, (), f"way/{n}", requests=1, prompt_tokens=n) for n in (10, 100, 1000, 5000)
    ]
    found = fit(PLAIN, [*steps, *ways])
    assert found.request_seconds == pytest.approx(0.004, rel=0.05)
    assert found.token_seconds == pytest.approx(2e-6, rel=0.1)


def test_one_observation_that_all_others_contradict_says_little() -> None:
    some = observe(PLAIN, 40, seed=4)
    wrong = [msgspec.structs.replace(some[0], seconds=30 * some[0].seconds), *some[1:]]
    found = fit(PLAIN, wrong)
    calibrated = found.model(PLAIN)
    off = [found.seconds(calibrated, o) / o.seconds - 1 for o in observe(PLAIN, 100, seed=5)]
    assert abs(float(np.median(off))) < 0.02


def test_steps_of_several_at_once_count_together() -> None:
    single = observe(PLAIN, 60, seed=6)
    pairs = [
        Observed(a.seconds + b.seconds, a.steps + b.steps, f"{i}")
        for i, (a, b) in enumerate(zip(single[::2], single[1::2], strict=True))
    ]
    found = fit(PLAIN, pairs)
    calibrated = found.model(PLAIN)
    off = [found.seconds(calibrated, o) / o.seconds - 1 for o in single]
    assert float(np.median(np.abs(off))) < 0.02


def test_too_little_is_refused_with_the_numbers() -> None:
    some = observe(PLAIN, 40, seed=7)
    with pytest.raises(UserError, match=rf"3 observations at 3 places .* valid: {FEWEST} places"):
        fit(PLAIN, some[:3])
    repeats = [msgspec.structs.replace(o, place="one") for o in some]
    with pytest.raises(UserError, match="40 observations at 1 places"):
        fit(PLAIN, repeats)
    alike = [Observed(0.01 + i / 1e5, (Step((100 + i,), (1,), 1),), f"{i}") for i in range(20)]
    with pytest.raises(UserError, match=r"all observed steps compute 1 tokens.* three sizes"):
        fit(PLAIN, alike)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="above 0"):
            fit(PLAIN, [*some[:-1], msgspec.structs.replace(some[-1], seconds=seconds)])


def test_terms_that_never_occurred_keep_a_rooflines_shape() -> None:
    found = fit(PLAIN, observe(PLAIN, 40, seed=8))
    assert found.factors["experts"] == pytest.approx(1.0, rel=0.1)  # a dense model has none


def _arrays(o: Observed) -> tuple[np.ndarray, np.ndarray, int]:  # type: ignore[type-arg]
    return np.array(o.steps[0].starts), np.array(o.steps[0].counts), o.steps[0].samples


def test_terms_add_up() -> None:
    s = observe(PLAIN, 1, seed=9)[0].steps[0]
    terms = PLAIN.terms(np.array(s.starts), np.array(s.counts), s.samples)
    assert replace(terms, host=0.0).vector().sum() < terms.vector().sum()
