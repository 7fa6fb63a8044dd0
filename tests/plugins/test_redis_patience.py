"""How long a request waits for its reservation."""

from __future__ import annotations

import pytest

from bien.plugins.indexes.redis.patience import LONGEST, TRIPS, Patience

LONG = 1e4  # ms of work


def test_a_request_waits_as_long_as_answers_take() -> None:
    patience = Patience(0.01)
    for _ in range(200):
        patience.took(0.001)
    assert patience.of(LONG) == 0.01, "a quiet machine: what is set"
    for _ in range(5):
        patience.took(0.04)
    assert 0.07 < patience.of(LONG) < TRIPS * 0.04, "busy for a moment is enough"
    for _ in range(200):
        patience.took(0.001)
    assert patience.of(LONG) == 0.01


@pytest.mark.parametrize(
    ("work", "seconds"), [(LONG, LONGEST), (100.0, 0.05), (30.0, 0.015), (1.0, 0.01), (0.0, 0.01)]
)
def test_nobody_waits_longer_than_it_can_save(work: float, seconds: float) -> None:
    patience = Patience(0.01)
    patience.took(60.0)
    assert patience.of(work) == pytest.approx(seconds)


def test_who_is_told_to_wait_longer_does() -> None:
    assert Patience(1.0).of(0.0) == 1.0
