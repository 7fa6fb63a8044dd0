"""`Fit`: a cost that is linear in what causes it, learned one sample at a time.

Least squares over exponentially forgotten samples (L. Ljung, "System Identification", 2nd ed., 11.2). What
was configured counts as a few samples more, so that it fades as real ones come; no coefficient falls below
zero (those that would are left out). Deterministic; a sample costs microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

OUTLIER = 4.0  # times what was expected; no sample counts as more


class Fit:
    """y = coefficients . x, y in milliseconds. `typical` is an ordinary x."""

    def __init__(
        self, prior: Sequence[float], typical: Sequence[float], *, strength: float, memory: float
    ) -> None:
        """`strength`: samples that the prior is worth. `memory`: samples until one counts 1/e."""
        self.coefficients = list(prior)
        self.samples = 0
        self._prior = list(prior)
        self._typical = list(typical)
        self._strength = strength
        self._keep = 1.0 - 1.0 / memory
        self._floor = _dot(prior, typical) / 10 + 1e-6
        self._xx = [[0.0] * len(prior) for _ in prior]  # decayed sums
        self._xy = [0.0] * len(prior)

    def predict(self, x: Sequence[float]) -> float:
        return _dot(self.coefficients, x)

    def add(self, x: Sequence[float], y: float) -> None:
        """Errors count relative to what was expected: large samples do not drown small ones."""
        expected = self.predict(x) + self._floor
        y = min(max(y, 0.0), OUTLIER * expected) / expected
        scaled = [v / expected for v in x]
        keep = self._keep
        # Once a step of every worker: no check, no index.
        for row, v in zip(self._xx, scaled, strict=False):
            row[:] = [r * keep + v * w for r, w in zip(row, scaled, strict=False)]
        self._xy = [s * keep + v * y for s, v in zip(self._xy, scaled, strict=False)]
        self.samples += 1

    def solve(self, prior: Sequence[float] | None = None) -> None:
        """Set the coefficients to what samples and prior say. `prior` replaces the one before."""
        if prior is not None:
            self._prior = list(prior)
        a, b = [row[:] for row in self._xx], self._xy[:]
        whole = _dot(self._prior, self._typical) + self._floor
        for j, (value, size) in enumerate(zip(self._prior, self._typical, strict=True)):
            weight = self._strength * (size / whole) ** 2
            a[j][j] += weight
            b[j] += weight * value
        self.coefficients = [0.0] * len(b)
        free = list(range(len(b)))
        while free:
            found = _solve([[a[i][j] for j in free] for i in free], [b[i] for i in free])
            if min(found) >= 0:
                for i, value in zip(free, found, strict=True):
                    self.coefficients[i] = value
                return
            free = [i for i, value in zip(free, found, strict=True) if value > 0]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """By Gauss: the prior makes the matrix positive definite."""
    n = len(b)
    for i in range(n):
        for k in range(i + 1, n):
            factor = a[k][i] / a[i][i]
            for j in range(i, n):
                a[k][j] -= factor * a[i][j]
            b[k] -= factor * b[i]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (b[i] - sum(a[i][j] * x[j] for j in range(i + 1, n))) / a[i][i]
    return x
