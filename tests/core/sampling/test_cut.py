"""Cut distributions of real sizes against plain loops, and against the filters for accelerators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bien.core.sampling import cut
from bien.core.sampling.cut import draw_row
from bien.core.sampling.sampler import _draw_on_device, draw

SHAPES = ("flat", "normal", "peaked", "ties", "equal", "sparse")


def row(shape: str, vocab: int, rng: np.random.Generator, dtype: Any = np.float32) -> NDArray[Any]:
    logits = rng.standard_normal(vocab) * {"flat": 0.5, "ties": 2.0}.get(shape, 3.5)
    if shape == "peaked":
        logits[rng.integers(0, vocab, 5)] += 20
    elif shape == "ties":
        logits = logits.round()
    elif shape == "equal":
        logits[:] = 0
    elif shape == "sparse":  # all but a few are forbidden
        logits[rng.random(vocab) < 0.999] = -np.inf
        logits[vocab // 2] = 0
    weights: NDArray[Any] = np.exp((logits - logits.max()).astype(dtype))
    return weights


def law(weights: NDArray[Any], top_p: float, top_k: int, min_p: float) -> NDArray[np.int64]:
    """The kept tokens, by sorting: heaviest first, of equals the lowest index first."""
    order = np.argsort(-weights, kind="stable")[:top_k]
    if top_p < 1:
        exact = weights[order].astype(np.float64)
        goal = top_p * math.fsum(exact)
        order = order[: int(np.cumsum(exact).searchsorted(goal)) + 1]
    order = order[weights[order] >= weights.dtype.type(min_p)]
    return np.sort(order)


def swept(weights: NDArray[Any], u: NDArray[np.float64], p: float, k: int, m: float) -> NDArray[np.int64]:
    return np.array([draw_row(weights, x, p, k, m) for x in u])


@settings(max_examples=150)
@given(
    st.integers(0, 1 << 20),
    st.sampled_from(SHAPES),
    st.sampled_from([1, 7, 255, 256, 257, 700, 3000, 20_000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.95, 0.999, 1.0]),
    st.sampled_from([1, 5, 50, 900, 15_000, 1 << 30]),
    st.sampled_from([0.0, 0.001, 0.3, 1.0]),
)
def test_tokens_are_those_of_the_law(
    seed: int, shape: str, vocab: int, top_p: float, top_k: int, min_p: float
) -> None:
    """u walks through the edges between the kept tokens' cumulative shares."""
    rng = np.random.default_rng(seed)
    weights = row(shape, vocab, rng)
    kept = law(weights, top_p, min(top_k, vocab), min_p)
    edges = weights[kept].astype(np.float64).cumsum()
    at = np.unique(rng.integers(0, len(kept), 4))
    middle = edges[at] - weights[kept[at]] / 2
    u = np.concatenate([[0.0, 1 - 2.0**-53], np.minimum(middle / edges[-1], 1 - 2.0**-53)])
    found = swept(weights, u, top_p, min(top_k, vocab), min_p)
    solid = weights[kept[at]] > 1e-9 * edges[-1]  # others hide in rounding
    assert found[2:][solid].tolist() == kept[at][solid].tolist()
    heavy = kept[weights[kept] > 0]
    assert found[0] == heavy[0]
    assert np.isin(found, heavy).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [
    (0.95, 49_152, 0.0),
    (1.0, 50, 0.0),
    (0.9, 40, 0.0),
    (1.0, 49_152, 0.1),
    (0.5, 49_152, 0.02),
    (1.0, 20_000, 0.0),
    (0.99, 5_000, 0.001),
    (0.0, 49_152, 0.0),
    (1.0, 1, 1.0),
    (0.999, 49_152, 0.0),
    (1.0, 49_152, 0.0),
])  # fmt: skip
def test_real_sizes(shape: str, dtype: Any, top_p: float, top_k: int, min_p: float) -> None:
    rng = np.random.default_rng(3)
    weights = row(shape, 49_152, rng, dtype)
    kept = law(weights, top_p, top_k, min_p)
    share = weights[kept].astype(np.float64).cumsum()
    for u in rng.random(4):
        at = int(share.searchsorted(u * share[-1], side="right"))
        assert draw_row(weights, u, top_p, top_k, min_p) in kept[max(0, at - 1) : at + 2]


def test_flat_nuclei_are_enclosed_and_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sample encloses is what a sort finds, and it is much less than all."""
    rng, sizes = np.random.default_rng(0), []
    sort = cut._crossing

    def noted(weights: Any, goal: float, count: int) -> Any:
        sizes.append(len(weights))
        return sort(weights, goal, count)

    monkeypatch.setattr(cut, "_crossing", noted)
    for p in (0.05, 0.5, 0.9, 0.95, 0.99):
        weights = row("flat", 49_152, rng)
        kept = law(weights, p, 49_152, 0.0)
        total = float(weights.sum(dtype=np.float64))
        size, least = cut._nucleus(weights, p * total, total)
        assert size == len(kept) and least == weights[kept].min()
    assert max(sizes) < 49_152 / 4


def test_a_sample_that_misleads_is_found_out() -> None:
    """All that is heavy lies beside the sampled positions, or on them only."""
    for heavy in (1, 0):
        weights = np.full(32_768, 0.01, np.float32)
        weights[heavy::16] = np.linspace(0.5, 1, 2048)
        total = float(weights.sum(dtype=np.float64))
        for p in (0.3, 0.8, 0.99):
            kept = law(weights, p, len(weights), 0.0)
            size, least = cut._nucleus(weights, p * total, total)
            assert size == len(kept) and least == weights[kept].min()


@settings(max_examples=60)
@given(
    st.integers(0, 1 << 20),
    st.sampled_from(SHAPES),
    st.sampled_from([0.2, 0.9, 1.0]),
    st.sampled_from([0, 3, 60, 2000]),
    st.sampled_from([0.0, 0.1]),
)
def test_accelerators_draw_the_same(seed: int, shape: str, p: float, k: int, m: float) -> None:
    """Up to what crosses an edge by rounding; here, where float64 is, never."""
    rng = np.random.default_rng(seed)
    weights = row(shape, 3000, rng, np.float64)
    with np.errstate(divide="ignore"):
        logits = torch.from_numpy(np.log(weights)).expand(8, -1)
    u, one = rng.random(8), np.ones(8)
    keep = np.full(8, k or 3000)
    there = _draw_on_device(logits, u, one, one * p, keep, one * m)
    assert draw(logits, u, one, one * p, keep, one * m).tolist() == there.tolist()


def test_rows_that_cut_and_rows_that_do_not() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(6, 3000)))
    u, one = rng.random(6), np.ones(6)
    plain = draw(logits, u, one, one, np.zeros(6, np.int64))
    mixed = draw(
        logits,
        u,
        one,
        np.array([1, 0.5, 1, 1, 1, 0.0]),
        np.array([0, 0, 3, 0, 0, 0]),
        one * [0, 0, 0, 0, 0.9, 0],
    )
    assert mixed[[0, 3]].tolist() == plain[[0, 3]].tolist()
    assert mixed[5] == logits[5].argmax()
    assert mixed[2] in logits[2].topk(3).indices


def test_logits_that_are_no_numbers_harm_nobody_else() -> None:
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(1))
    u, one, k = np.full(3, 0.4), np.ones(3), np.full(3, 9)
    good = draw(logits, u, one, one, k)
    logits[1, 5] = math.nan
    found = draw(logits, u, one, one, k)
    assert found[[0, 2]].tolist() == good[[0, 2]].tolist()
    assert 0 <= int(found[1]) < 900
