"""`Pace`: what steps cost, from the workers' own reports; who is slower than others; who has worked most.

It looks at cumulative counts when a request is placed, not at each report: how reports are grouped (of a jump
of many steps a simulation makes one) must not change what is learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

from bien.gateway.api import WorkerStats
from bien.plugins.routers._fit import Fit

MEMORY = 2000.0  # steps until one counts 1/e in a worker's speed
DOUBT_MS = 10_000.0  # of busy time as expected, that a worker's speed begins with
ALIKE = 1.1  # so far a speed is taken for noise, which must not decide what is equal otherwise
HORIZON_MS = 3.6e6  # busy time per worker until work counts 1/e
MOST = 1e100


class _Worker:
    __slots__ = ("expected", "last", "took", "work")

    def __init__(self, work: float) -> None:
        self.last: WorkerStats | None = None
        self.took = self.expected = DOUBT_MS
        self.work = work


class Pace:
    """Busy time of steps = step + token x prompt tokens + row x sequences, the same for all workers but for a
    factor of each, which is 1 until its reports say otherwise."""

    def __init__(self, step: float, token: float, row: float, outputs: float) -> None:
        self.step, self.token, self.row = step, token, row
        self.outputs = outputs  # tokens of a request
        self._fit = Fit((step, token, row), (1.0, 512.0, 8.0), strength=20, memory=5000)
        self._workers: dict[str, _Worker] = {}
        self._gain = 1.0  # of work done now over work counted at first: forgetting without touching all
        self._written, self._finished = outputs * 20, 20.0

    def factors(self, workers: Sequence[str]) -> list[float]:
        """How many times slower than all of them together each worker is, less what may be noise."""
        found = map(self._workers.get, workers)
        slow = [w.took / w.expected if w is not None else 1.0 for w in found]
        return [f / ALIKE if f > ALIKE else min(1.0, f * ALIKE) for f in slow]

    def shares(self, workers: Sequence[str]) -> list[float]:
        """Of the lately done work, above the mean: 0.1 is a tenth more than that. At most 1."""
        known = [w.work for name in workers if (w := self._workers.get(name)) is not None]
        mean = sum(known) / len(known) if known else 0.0
        if not mean:
            return [0.0] * len(workers)
        found = map(self._workers.get, workers)
        return [min(1.0, w.work / mean - 1.0) if w is not None else 0.0 for w in found]

    def look(self, name: str, stats: WorkerStats, learn: bool = True) -> None:
        """What a worker has counted until now. `learn` False: what it did counts, what that cost does not."""
        worker = self._workers.get(name)
        if worker is None:  # as if it had worked as much as others: newcomers are not flooded
            works = [w.work for w in self._workers.values()]
            worker = self._workers[name] = _Worker(sum(works) / len(works) if works else 0.0)
        last = worker.last
        if last == stats:
            return
        worker.last = copy(stats)  # who reports may go on counting in it
        if last is None:
            return
        steps, ms = stats.steps - last.steps, (stats.busy_seconds - last.busy_seconds) * 1000
        written, finished = stats.output_tokens - last.output_tokens, stats.finished - last.finished
        if min(steps, ms, written, finished, stats.computed_tokens - last.computed_tokens) < 0:
            return  # it was started again
        self._worked(worker, ms)
        self._ended(written, finished)
        if learn and steps and ms:
            prompt = max(0, stats.computed_tokens - last.computed_tokens - written)
            self._stepped(worker, (1.0, prompt / steps, written / steps), steps, ms)

    def keep(self, names: Sequence[str]) -> None:
        """Forget all workers but these."""
        self._workers = {name: w for name, w in self._workers.items() if name in names}

    def __len__(self) -> int:
        return len(self._workers)

    def _stepped(self, worker: _Worker, x: tuple[float, float, float], steps: int, ms: float) -> None:
        expected = self._fit.predict(x) * steps
        keep = math.exp(-steps / MEMORY)
        worker.took = worker.took * keep + min(ms, 4 * expected)
        worker.expected = worker.expected * keep + expected
        self._fit.add(x, ms / steps)
        if self._fit.samples % 8 == 0:
            self._fit.solve()
            self.step, self.token, self.row = self._fit.coefficients

    def _worked(self, worker: _Worker, ms: float) -> None:
        worker.work += ms * self._gain
        self._gain *= 1.0 + ms / (HORIZON_MS * len(self._workers))
        if self._gain > MOST:
            for other in self._workers.values():
                other.work /= self._gain
            self._gain = 1.0

    def _ended(self, written: int, finished: int) -> None:
        self._written += written
        self._finished += finished
        if self._finished > 1000:
            self._written /= 2
            self._finished /= 2
        self.outputs = self._written / self._finished
