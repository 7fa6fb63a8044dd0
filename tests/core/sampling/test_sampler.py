from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bien.core.sampling.sampler import draw, filtered, sample_rows

TEMPERATURES = st.sampled_from([0.3, 0.7, 1.0, 2.5])
TOP_P = st.sampled_from([0.0, 0.05, 0.5, 0.75, 0.9, 0.999, 1.0])
# Few distinct values: ties, forbidden tokens and exact crossings are common.
LOGITS = st.lists(
    st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=9
).filter(lambda row: max(row) > -math.inf)


def law(logits: list[float], temperature: float, top_p: float, top_k: int) -> NDArray[np.float64]:
    """The law in plain loops: sort, cut, renormalise."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        total, kept, mass = math.fsum(weights[i] for i in order), [], 0.0
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= top_p * total:
                break
        order = kept
    out: NDArray[np.float64] = np.zeros(len(logits))
    for i in order:
        out[i] = weights[i]
    out /= out.sum()
    return out


def swept(logits: list[float], temperature: float, top_p: float, top_k: int, n: int) -> NDArray[np.float64]:
    """Frequencies over n evenly spaced quantiles: off by at most 1/n per token from the law."""
    u = (np.arange(n) + 0.5) / n
    rows = torch.tensor([logits], dtype=torch.float64).expand(n, -1)
    tokens = draw(rows, u, np.full(n, temperature), np.full(n, top_p), np.full(n, top_k))
    return np.bincount(tokens.numpy(), minlength=len(logits)) / n


@settings(max_examples=150, deadline=None)
@given(LOGITS, TEMPERATURES, TOP_P, st.integers(0, 10))
def test_law_by_sweeping_the_uniform(row: list[float], temperature: float, top_p: float, top_k: int) -> None:
    exact = law(row, temperature, top_p, top_k)
    seen = swept(row, temperature, top_p, top_k, 200)
    assert np.abs(seen - exact).max() <= 1 / 200 + 1e-12
    assert not seen[exact == 0].any()


@pytest.mark.parametrize("vocab", [255, 256, 257, 3000])
def test_law_over_pieces(vocab: int) -> None:
    """The token at u is the first whose cumulative probability exceeds u."""
    generator = torch.Generator().manual_seed(vocab)
    row = torch.randn(vocab, dtype=torch.float64, generator=generator) * 2
    edges = torch.softmax(row, 0).cumsum(0).numpy()
    u = np.concatenate([np.linspace(0, 1 - 2**-53, 200), edges[:-1] - 1e-12, edges[:-1] + 1e-12])[:900]
    n = len(u)
    tokens = draw(row.expand(n, -1), u, np.ones(n), np.ones(n), np.zeros(n, np.int64)).numpy()
    np.testing.assert_array_equal(tokens, np.minimum(np.searchsorted(edges, u, side="right"), vocab - 1))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(1, 700), TOP_P, st.sampled_from([0, 1, 2, 5, 50, 400]), st.booleans()
)
def test_filter_against_a_full_sort(seed: int, vocab: int, top_p: float, top_k: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(vocab, dtype=torch.float64, generator=generator) * 3
    row = row.round() if ties else row
    weights = (row - row.max()).exp()[None]
    k = min(top_k, vocab) or vocab
    out = filtered(weights, torch.tensor([top_p], dtype=torch.float64), torch.tensor([k]))[0]
    exact = law(row.tolist(), 1.0, top_p, top_k)
    np.testing.assert_array_equal(out.numpy() > 0, exact > 0)
    assert torch.equal(out[out > 0], weights[0][out > 0])


def test_extreme_quantiles_choose_possible_tokens() -> None:
    row = torch.tensor([[-math.inf, 0.0, 0.1, 0.2, -math.inf]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for u, token in ((0.0, 1), (1 - 2.0**-53, 3)):
            out = draw(row.to(dtype), np.array([u]), np.ones(1), np.ones(1), np.zeros(1, np.int64))
            assert out.tolist() == [token]


def test_greedy_takes_the_lowest_index_of_equal_maxima() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 700:] = 1.0
    logits[2, 999] = 1.0
    tokens = sample_rows(logits, np.arange(3), np.arange(3), np.zeros(3), np.ones(3), np.zeros(3))
    assert tokens.dtype is torch.int64
    assert tokens.tolist() == [0, 700, 999]


def test_float64_logits_stay_float64() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert sample_rows(logits, [0], [0], [0.0], [1.0], [0]).tolist() == [1]
    assert sample_rows(logits, [0], [0], [1.0], [1.0], [1]).tolist() == [1]
    assert sample_rows(logits, [0], [0], [1.0], [0.1], [0]).tolist() == [1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_batch(seed: int, rows: int, random: object) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(rows, 300)) * 3)
    seeds, positions = rng.integers(-(2**63), 2**63 - 1, rows), rng.integers(0, 1000, rows)
    heat, top_p = rng.choice([0.0, 0.5, 1.0], rows), rng.choice([0.3, 0.95, 1.0], rows)
    top_k = rng.choice([0, 1, 7, 299, 500], rows)
    together = sample_rows(logits, seeds, positions, heat, top_p, top_k)
    order = rng.permutation(rows)
    shuffled = sample_rows(
        logits[order], seeds[order], positions[order], heat[order], top_p[order], top_k[order]
    )
    assert shuffled.tolist() == together[order].tolist()
    for i in range(rows):
        one = slice(i, i + 1)
        alone = sample_rows(logits[one], seeds[one], positions[one], heat[one], top_p[one], top_k[one])
        assert alone.tolist() == [int(together[i])]


def test_frequencies_over_positions_follow_the_law() -> None:
    row, n = [0.0, 1.0, 2.0, -1.0], 20_000
    tokens = sample_rows(
        torch.tensor([row]).expand(n, -1),
        np.full(n, 3),
        np.arange(n),
        np.ones(n),
        np.full(n, 0.95),
        np.zeros(n),
    )
    exact = law(row, 1.0, 0.95, 0)
    counts = np.bincount(tokens.numpy(), minlength=4)
    possible = exact > 0
    assert counts[~possible].sum() == 0
    assert ((counts - n * exact)[possible] ** 2 / (n * exact[possible])).sum() < 13.8  # 2 degrees, p = 0.001


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-40, 1e-300, 5e-324])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    """Some are zero in float32; a token that is not a number would fail the step of all who share it."""
    rng = np.random.default_rng(4)
    logits = torch.tensor(rng.normal(0, 2, (6, 300)), dtype=torch.float32)  # 300: the last piece is padded
    drawn = sample_rows(logits, np.arange(6), np.arange(6), np.full(6, temperature), np.ones(6), np.zeros(6))
    assert drawn.tolist() == logits.argmax(-1).tolist()
