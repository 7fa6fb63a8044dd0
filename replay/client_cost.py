"""`ClientCost`: whether the measuring side was itself the bottleneck."""

from __future__ import annotations

import resource

from bien.core.clock import Clock
from bien.replay.metrics import Distribution

_EVERY = 0.05  # seconds


class ClientCost:
    """CPU time of this process, and how late its event loop ran timers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lags: list[float] = []
        self._begin = _cpu_seconds()
        self._end: float | None = None

    async def run(self) -> None:
        """Watch the loop until cancelled."""
        clock = self._clock
        while True:
            due = clock.time() + _EVERY
            await clock.sleep(_EVERY)
            self._lags.append(max(0.0, clock.time() - due))

    def stop(self) -> None:
        self._end = _cpu_seconds()

    @property
    def cpu_seconds(self) -> float:
        return (_cpu_seconds() if self._end is None else self._end) - self._begin

    @property
    def loop_lag_ms(self) -> Distribution:
        return Distribution.of(self._lags, 1e3)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
