from __future__ import annotations

import numpy as np

from bien.core.sampling.acceptance import forced_lengths


def test_chances_are_of_each_position() -> None:
    rows = 30_000
    chances = (0.9, 0.5, 1.0, 0.0, 0.7)
    found = forced_lengths(chances, 5, np.arange(rows), 0, np.full(rows, 5))
    share = np.bincount(found, minlength=6) / rows
    np.testing.assert_allclose(share, [0.1, 0.45, 0, 0.45, 0, 0], atol=0.012)


def test_no_more_than_there_are() -> None:
    limits = np.array([0, 1, 2, 3, 9])
    assert forced_lengths((1.0, 1.0, 1.0), 1, np.arange(5), 0, limits).tolist() == [0, 1, 2, 3, 3]
    assert forced_lengths((), 1, np.arange(5), 0, limits).tolist() == [0] * 5


def test_a_round_draws_its_length_again() -> None:
    chances, many = (0.6,) * 8, np.full(40, 8)
    once = forced_lengths(chances, np.arange(40), 12, 0, many)
    assert np.array_equal(once, forced_lengths(chances, np.arange(40), 12, 0, many))
    assert not np.array_equal(once, forced_lengths(chances, np.arange(40), 13, 0, many))
    assert not np.array_equal(once, forced_lengths(chances, np.arange(40), 12, 1, many))
