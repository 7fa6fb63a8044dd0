"""`Calibration`: what a few measurements say of a cost model's error elsewhere. No measurement is needed to
choose where to measure.

The logarithm of measured over predicted is a Gaussian process over the inputs (Rasmussen and Williams 2006,
chapter 2): a constant, slopes, and something smooth. Far from every measurement it falls back to the constant
and the slopes, and its interval widens. A measurement that all the others contradict is trusted less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.errors import UserError

Array = NDArray[np.float64]
COVERED = 0.9  # of the truth by an interval
ROUNDS = 4  # of finding what the others contradict
MOST = 5.0  # deviations that one measurement is off, at most, when intervals are stretched by it
PRIOR = 4.0  # measurements that the kernel's own deviations count for then


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """How errors at two places hang together: standard deviations of the logarithm."""

    constant: float  # of the factor that all predictions are off by
    smooth: float  # of what depends on the place
    length: float = 1.2  # distance, in scaled features, over which that changes
    foreign: float = 0.5  # share of it that two versions of an engine have in common
    version: float = 0.1  # of the factor of a version
    slopes: tuple[float, ...]  # per scaled feature
    noise: float  # of a measurement
    doubt: float = 0.0  # standard deviations from where a measurement is distrusted; 0: never

    def __call__(self, a: Places, b: Places) -> Array:
        far = ((a.features[:, None] - b.features[None]) ** 2).sum(-1)
        same = np.array([[x == y for y in b.versions] for x in a.versions], dtype=np.float64)
        same = same.reshape(len(a.versions), len(b.versions))
        common = self.foreign + (1 - self.foreign) * same
        near: Array = np.exp(-far / (2 * self.length**2))
        slopes = (a.features * np.square(self.slopes)) @ b.features.T
        total: Array = self.constant**2 + self.smooth**2 * common * near + slopes + self.version**2 * same
        return total


@dataclass(frozen=True, slots=True)
class Places:
    """Where something is predicted or measured."""

    features: Array  # [places, features], scaled so that 1 is a step that matters, 0 a usual value
    versions: Sequence[str]

    def take(self, which: Sequence[int] | NDArray[np.int64]) -> Places:
        return Places(self.features[np.asarray(which, dtype=np.int64)], [self.versions[i] for i in which])


def choose(kernel: Kernel, places: Places, count: int, weights: Array | None = None) -> list[int]:
    """Which `count` places to measure: one after the other the one that leaves the least uncertainty over all
    of them, each weighing 1 or as `weights` say (active learning after Cohn 1996). It looks at no
    measurement."""
    if not 0 < count <= len(places.versions):
        raise UserError(f"{count} of {len(places.versions)} places cannot be chosen", field="calibrate")
    left = kernel(places, places)
    each = np.ones(len(left)) if weights is None else weights
    chosen: list[int] = []
    for _ in range(count):
        gain = (np.square(left) * each[:, None]).sum(0) / (np.diag(left) + kernel.noise**2)
        gain[chosen] = -1.0
        best = int(gain.argmax())
        chosen.append(best)
        left = left - np.outer(left[:, best], left[:, best]) / (left[best, best] + kernel.noise**2)
    return chosen


class Calibration:
    """Predicts factors. Without measurements: 1, as uncertain as the kernel says."""

    def __init__(self, kernel: Kernel, places: Places, ratios: Sequence[float]) -> None:
        """`ratios`: measured over predicted. UserError: one is not positive."""
        if any(not r > 0 for r in ratios):
            raise UserError(f"measured / predicted = {min(ratios)!r}; valid: above 0", field="calibrate")
        self.kernel, self.places = kernel, places
        logs = np.log(np.asarray(ratios, dtype=np.float64))
        self._middle = float(np.median(logs)) if len(logs) else 0.0
        self._inverse = np.zeros((0, 0))
        self._weights = np.zeros(0)
        self._stretch = 1.0  # of deviations: how wrong each measurement finds the others' word
        if len(logs):
            self._fit(kernel(places, places), logs - self._middle)

    def factors(self, places: Places) -> tuple[Array, Array]:
        """Factors, and the standard deviations of their logarithms, noise of a measurement included."""
        own = np.array(
            [self.kernel(p, p)[0, 0] for p in (places.take([i]) for i in range(len(places.versions)))]
        )
        if not len(self._weights):
            return np.ones(len(own)), np.sqrt(own + self.kernel.noise**2)
        cross = self.kernel(places, self.places)
        mean = self._middle + cross @ self._weights
        spread = own - np.einsum("ij,jk,ik->i", cross, self._inverse, cross)
        return np.exp(mean), self._stretch * np.sqrt(np.maximum(spread, 0.0) + self.kernel.noise**2)

    def within(self, places: Places) -> NDArray[np.bool_]:
        """Whether each place lies inside the range of what was measured, in every feature."""
        if not len(self._weights):
            return np.zeros(len(places.versions), dtype=np.bool_)
        low, high = self.places.features.min(0), self.places.features.max(0)
        inside: NDArray[np.bool_] = ((places.features >= low) & (places.features <= high)).all(1)
        return inside

    def _fit(self, k: Array, y: Array) -> None:
        usual = self.kernel.noise**2
        noise = np.full(len(y), usual)
        stretch: Array = np.ones(len(y))
        for _ in range(ROUNDS if self.kernel.doubt else 1):
            inverse = np.linalg.inv(k + np.diag(noise))
            self._inverse = np.asarray(inverse, dtype=np.float64)
            self._weights = inverse @ y
            # What the others say of each one (leave-one-out, in closed form): error and its deviation.
            certainty = np.diag(inverse)
            error = np.abs(self._weights) / certainty
            deviation = np.sqrt(np.maximum(1 / certainty - noise, 0.0) + usual)
            stretch = np.asarray(np.minimum(error / deviation, MOST), dtype=np.float64)
            if self.kernel.doubt:
                wrong = error > self.kernel.doubt * deviation
                noise = np.where(wrong, usual + (error / self.kernel.doubt) ** 2, usual)
        self._stretch = float(np.sqrt((PRIOR + np.square(stretch).sum()) / (PRIOR + len(y))))


def interval(factor: float, deviation: float) -> tuple[float, float]:
    """Where `COVERED` of the truth lies, of a factor and the deviation of its logarithm."""
    reach = NormalDist().inv_cdf(0.5 + COVERED / 2) * deviation
    return factor * float(np.exp(-reach)), factor * float(np.exp(reach))
