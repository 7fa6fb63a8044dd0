"""`WorkerLoad`: how evenly the workers were busy, in windows of 60 seconds."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from bien.core.clock import Clock

WINDOW = 60.0  # seconds
_BUSY = re.compile(r'^bien_worker_busy_seconds\{worker="([^"]*)"\} (\S+)$', re.MULTILINE)


class WorkerLoad:
    """Reads cumulative busy seconds at the start, each 60 seconds, and at the end."""

    def __init__(self, clock: Clock, read: Callable[[], Awaitable[dict[str, float]]]) -> None:
        self._clock = clock
        self._read = read
        self._samples: list[dict[str, float]] = []
        self._times: list[float] = []  # of the samples

    async def sample(self) -> None:
        self._samples.append(await self._read())
        self._times.append(self._clock.time())

    async def run(self) -> None:
        """Sample until cancelled; call `sample` once more at the end."""
        while True:
            await self.sample()
            await self._clock.sleep(WINDOW)

    @property
    def imbalance(self) -> float | None:
        """Busiest worker over the mean, of each window, weighted by the window's busy time. None without
        readings; 1.0 for a single worker."""
        weighted = total = 0.0
        for before, after in zip(self._samples, self._samples[1:], strict=False):
            busy = [max(0.0, after[w] - before.get(w, 0.0)) for w in after]
            if busy and sum(busy) > 0:
                weighted += max(busy) * len(busy)
                total += sum(busy)
        return weighted / total if total else None

    @property
    def utilisation(self) -> float | None:
        """Share of the time between the first and the last reading in which workers computed, their mean."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return None
        first, last = self._samples[0], self._samples[-1]
        busy = sum(max(0.0, last[w] - first.get(w, 0.0)) for w in last)
        return busy / len(last) / (self._times[-1] - self._times[0]) if last else None


def busy_seconds(page: str) -> dict[str, float]:
    """By worker, from a gateway's /metrics page."""
    return {worker: float(value) for worker, value in _BUSY.findall(page)}
