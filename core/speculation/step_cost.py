"""`StepCost`: how long a step of so many tokens takes, learnt from the steps that an engine has finished."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
PER_OCTAVE = 4  # sizes that are told apart, above PER_OCTAVE tokens
KEPT = 15  # steps of a size: their median is what such a step takes
HALF_LIFE = 128  # steps after which what was seen of a size weighs half
FRESH = 1024  # steps: a size seen since then is known


class StepCost:
    """Seconds by tokens: a median for each size, made monotone by pooling neighbours (isotonic regression,
    weighed by age), straight between them. Beyond what was seen it goes on as steeply as at its end, and
    below never falls faster than in proportion."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._step = 0
        self._curve: tuple[F64, F64] | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """A step has ended. Steps that took no time tell nothing."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        self._step += 1
        self._sizes.setdefault(_bucket(tokens), _Size()).add(self._step, tokens, seconds)
        self._curve = None

    def knows(self, tokens: float) -> bool:
        """Whether steps of about this size were seen lately."""
        near = _bucket(max(1, round(tokens)))
        found = (self._sizes.get(b) for b in (near - 1, near, near + 1))
        return any(size is not None and self._step - size.last < FRESH for size in found)

    def seconds(self, tokens: F64) -> F64:
        """Of steps of these sizes, which ascend; all 1 until any was seen."""
        if not self._sizes:
            return np.ones(len(tokens))
        x, y = self._curve = self._curve or self._fit()
        out = np.interp(tokens, x, y)
        if tokens[-1] > x[-1]:
            near = max(x[-1] / 2, x[0])
            rise = (y[-1] - np.interp(near, x, y)) / (x[-1] - near) if len(x) > 1 else y[-1] / x[-1]
            out = np.where(tokens > x[-1], y[-1] + rise * (tokens - x[-1]), out)
        if tokens[0] < x[0]:
            near = min(x[0] * 2, x[-1])
            fall = (np.interp(near, x, y) - y[0]) / (near - x[0]) if len(x) > 1 else 0.0
            least = y[0] * tokens / x[0]
            out = np.where(tokens < x[0], np.maximum(least, y[0] - fall * (x[0] - tokens)), out)
        return out

    def _fit(self) -> tuple[F64, F64]:
        for bucket in [b for b, s in self._sizes.items() if self._step - s.last > 16 * HALF_LIFE]:
            del self._sizes[bucket]
        known = sorted(self._sizes.items())
        # Blocks of (sum of weights, weighted mean, how many sizes): pooled while one is dearer than the next.
        blocks: list[tuple[float, float, int]] = []
        for _, size in known:
            weight = len(size.seconds) * 0.5 ** ((self._step - size.last) / HALF_LIFE)
            block = (max(weight, 1e-9), size.median, 1)
            while blocks and blocks[-1][1] >= block[1]:
                w, mean, n = blocks.pop()
                both = w + block[0]
                block = (both, (w * mean + block[0] * block[1]) / both, n + block[2])
            blocks.append(block)
        x = np.array([size.tokens for _, size in known])
        return x, np.repeat([mean for _, mean, _ in blocks], [n for _, _, n in blocks])


class _Size:
    def __init__(self) -> None:
        self.last = 0
        self.tokens = 0.0  # the mean size
        self.median = 0.0
        self.seconds: deque[tuple[int, float]] = deque(maxlen=KEPT)

    def add(self, step: int, tokens: int, seconds: float) -> None:
        self.last = step
        self.seconds.append((tokens, seconds))
        self.tokens = sum(t for t, _ in self.seconds) / len(self.seconds)
        # Of a size's steps the smaller ones take less: brought to their mean, so that a median may choose.
        self.median = median(s * self.tokens / t for t, s in self.seconds)


def _bucket(tokens: int) -> int:
    return int(bisect_left(_EDGES, tokens))


_EDGES = sorted({round(2 ** (i / PER_OCTAVE)) for i in range(32 * PER_OCTAVE)})
