"""Calibration on a few measurements: what it recovers, where it falls back, what it distrusts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bien.core.costs.calibrate import COVERED, Calibration, Kernel, Places, choose, interval
from bien.core.errors import UserError

KERNEL = Kernel(constant=1.0, smooth=0.3, version=0.1, slopes=(0.2, 0.2), noise=0.02)


def grid(n: int = 6, version: str = "1") -> Places:
    side = np.linspace(-1.5, 1.5, n)
    features = np.array([(x, y) for x in side for y in side])
    return Places(features, [version] * len(features))


def test_a_common_factor_is_recovered_everywhere() -> None:
    places = grid()
    at = choose(KERNEL, places, 5)
    factors, deviations = Calibration(KERNEL, places.take(at), [3.0] * 5).factors(places)
    assert factors == pytest.approx(3.0, rel=1e-6)
    assert (deviations < KERNEL.constant).all()


def test_a_trend_is_recovered_between_measurements() -> None:
    places = grid()
    truth = np.exp(0.5 + 0.3 * places.features[:, 0] - 0.2 * places.features[:, 1])
    at = choose(KERNEL, places, 8)
    factors, _ = Calibration(KERNEL, places.take(at), truth[at]).factors(places)
    assert np.abs(factors / truth - 1).max() < 0.05
    plain, _ = Calibration(KERNEL, places.take([]), []).factors(places)
    assert plain == pytest.approx(1.0)


def test_far_from_all_measurements_the_constant_and_the_slopes_are_left() -> None:
    near = Places(np.zeros((1, 2)), ["1"])
    far = Places(np.array([[50.0, 0.0]]), ["1"])
    calibration = Calibration(KERNEL, near, [2.0])
    factors, deviations = calibration.factors(far)
    assert factors == pytest.approx(2.0)  # one measurement says nothing of slopes
    assert deviations[0] > 10 * calibration.factors(near)[1][0]
    assert not calibration.within(far)[0] and calibration.within(near)[0]


def test_another_version_is_less_sure() -> None:
    places = Places(np.zeros((2, 2)), ["1", "2"])
    _, deviations = Calibration(KERNEL, places.take([0]), [1.5]).factors(places)
    assert deviations[1] > 1.5 * deviations[0]


def test_what_all_others_contradict_is_distrusted() -> None:
    places = grid()
    at = choose(KERNEL, places, 8)
    ratios = np.full(8, 2.0)
    ratios[3] = 200.0  # a queue, a cold cache
    trusting = Calibration(KERNEL, places.take(at), ratios).factors(places)[0]
    doubting = Calibration(msgspec.structs.replace(KERNEL, doubt=2.0), places.take(at), ratios).factors(
        places
    )[0]
    assert np.median(np.abs(doubting / 2 - 1)) < 0.1 < np.median(np.abs(trusting / 2 - 1))


def test_intervals_hold_what_the_kernel_itself_draws() -> None:
    places, inside = grid(), []
    covariance = KERNEL(places, places)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        clean = np.exp(rng.multivariate_normal(np.zeros(36), covariance))
        truth = clean * np.exp(KERNEL.noise * rng.standard_normal(36))
        at = choose(KERNEL, places, 8)
        factors, deviations = Calibration(KERNEL, places.take(at), truth[at]).factors(places)
        for i in set(range(36)) - set(at):
            low, high = interval(factors[i], deviations[i])
            inside.append(low <= truth[i] <= high)
    assert np.mean(inside) == pytest.approx(COVERED, abs=0.05)


def test_contradicted_measurements_widen_intervals() -> None:
    places = grid()
    at = choose(KERNEL, places, 8)
    rng = np.random.default_rng(1)
    calm = Calibration(KERNEL, places.take(at), [2.0] * 8).factors(places)[1]
    wild = Calibration(KERNEL, places.take(at), np.exp(rng.standard_normal(8))).factors(places)[1]
    assert (wild > 1.5 * calm).all()


def test_chosen_places_are_spread_and_leave_less_doubt_than_neighbours() -> None:
    places = grid()
    at = choose(KERNEL, places, 6)
    assert len(set(at)) == 6
    spread = Calibration(KERNEL, places.take(at), [1.0] * 6).factors(places)[1]
    together = Calibration(KERNEL, places.take(range(6)), [1.0] * 6).factors(places)[1]
    assert spread.mean() < 0.8 * together.mean()


def test_more_places_than_there_are_and_senseless_ratios_are_refused() -> None:
    with pytest.raises(UserError, match="37 of 36"):
        choose(KERNEL, grid(), 37)
    with pytest.raises(UserError, match="above 0"):
        Calibration(KERNEL, grid().take([0]), [0.0])
    with pytest.raises(UserError, match="above 0"):
        Calibration(KERNEL, grid().take([0]), [float("nan")])
