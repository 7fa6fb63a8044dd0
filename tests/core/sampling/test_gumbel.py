from __future__ import annotations

import numpy as np
import pytest
import torch

from bien.core.sampling.gumbel import largest, noise_of
from bien.core.sampling.rng import Purpose, as_u64, philox4x32
from bien.core.sampling.sampler import filtered_weights, sample_rows

SEEDS = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]


def slow(seed: int, position: int, choice: int, token: int) -> float:
    low = np.uint64(0xFFFFFFFF)
    key = as_u64([seed])
    counter = tuple(as_u64([v]) for v in (position, token // 2, choice, int(Purpose.NOISE)))
    words = philox4x32(counter, (key & low, key >> np.uint64(32)))  # type: ignore[arg-type]
    high, rest = (int(w[0]) for w in words[2 * (token % 2) : 2 * (token % 2) + 2])
    u = (((high >> 5) << 26 | rest >> 6) + 0.5) * 2.0**-53
    return float(-np.log(-np.log(u)))


def test_noise_is_philox_of_the_token() -> None:
    width = 7
    like = torch.zeros(len(SEEDS), width)
    positions, choices = [0, 5, 2**31, 7, 9], [0, 1, 2**32 - 1, 3, 4]
    seeds = np.array(SEEDS, np.uint64)
    found = noise_of(like, seeds, positions, choices)
    assert found.dtype == torch.float64 and tuple(found.shape) == (5, width)
    for i, (seed, position, choice) in enumerate(zip(SEEDS, positions, choices, strict=True)):
        for token in range(width):
            assert float(found[i, token]) == pytest.approx(slow(seed, position, choice, token), rel=1e-12)
    ids = torch.tensor([6, 0, 3])
    assert torch.equal(noise_of(like[:, :3], seeds, positions, choices, ids), found[:, ids])
    each = torch.stack([torch.randperm(width)[:4] for _ in SEEDS])
    assert torch.equal(noise_of(like[:, :4], seeds, positions, choices, each), found.gather(1, each))


def test_the_largest_is_a_draw() -> None:
    law = np.array([0.5, 0.0, 0.25, 0.2, 0.05])
    rows = 40_000
    weights = torch.tensor(law * 3).expand(rows, -1)
    found = np.bincount(largest(weights, 7, np.arange(rows), 0).numpy(), minlength=5) / rows
    assert found[1] == 0
    assert np.abs(found - law).max() < 0.01  # four standard deviations


def test_shared_noise_agrees_as_often_as_the_theory_says() -> None:
    rng = np.random.default_rng(3)
    rows = 20_000
    p, q = (torch.tensor(rng.dirichlet(np.ones(12))) for _ in range(2))
    distance = float((p - q).abs().sum() / 2)
    found = [largest(law.expand(rows, -1), 5, np.arange(rows), 0) for law in (p, q)]
    agreed = float((found[0] == found[1]).double().mean())
    assert agreed > (1 - distance) / (1 + distance) - 0.015
    assert agreed < 1 - distance + 0.015, "no coupling agrees more often"


def test_sampling_with_gumbel_noise() -> None:
    """Greedy rows stay greedy; filters hold; the draw is that of seed, choice and position, in any batch."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    heat, top_k = np.array([0, 0.8, 0.8, 2, 2, 1.0]), np.array([0, 0, 3, 3, 0, 1])
    seeds, positions = np.arange(6) * 7, np.arange(6)

    def draw(rows: list[int]) -> list[int]:
        return sample_rows(
            logits[rows],
            seeds[rows],
            positions[rows],
            heat[rows],
            np.full(len(rows), 0.9),
            top_k[rows],
            np.full(len(rows), 0.01),
            choices=np.zeros(len(rows), np.int64),
            noise="gumbel",
        ).tolist()

    together = draw(list(range(6)))
    assert together == [draw([i])[0] for i in range(6)]
    assert together[0] == int(logits[0].argmax()) and together[5] == int(logits[5].argmax())
    assert together[2] in logits[2].topk(3).indices.tolist()
    weights = filtered_weights(logits[4:5], heat[4:5], np.array([0.9]), np.array([0]), np.array([0.01]))
    assert together[4] == int(largest(weights, seeds[4], positions[4], 0))
