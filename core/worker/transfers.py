"""Copies between memory tiers: off the engine's thread when live, on the clock in simulation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol

from bien.core.clock import Clock


class Job(Protocol):
    """One running copy."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        ...

    def result(self) -> Any:
        """What `work` returned, or its exception; after `done()`."""
        ...


class Transfers(Protocol):
    """Runs copies in the order of `start`, as many at a time as it has lanes."""

    def start(self, work: Callable[[], Any], nbytes: int) -> Job:
        """Begin `work`, which moves `nbytes`. Returns at once."""
        ...

    def close(self) -> None:
        """Drop what has not begun (it ends with CancelledError) and wait for what has."""
        ...


class TransferPool:
    """Copies on threads of their own."""

    def __init__(self, workers: int = 1) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="bien-transfer")

    def start(self, work: Callable[[], Any], nbytes: int) -> Job:
        future: Future[Any] = self._threads.submit(work)
        return future

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


class TimedTransfers:
    """Copies of simulations: `work` runs at once, its end is noticed nbytes / bandwidth seconds after the
    lane's last copy, on the clock. `lanes` share nothing: each has the whole bandwidth."""

    def __init__(self, clock: Clock, bytes_per_s: float, lanes: int = 1) -> None:
        self._clock = clock
        self._bandwidth = bytes_per_s
        self._free = [0.0] * lanes
        self._running: list[TimedJob] = []

    def start(self, work: Callable[[], Any], nbytes: int) -> Job:
        now = self._clock.time()
        lane = min(range(len(self._free)), key=self._free.__getitem__)
        self._free[lane] = max(now, self._free[lane]) + nbytes / self._bandwidth
        job = TimedJob(self._clock, self._free[lane], work())
        self._running = [j for j in self._running if j.ends > now]
        self._running.append(job)
        return job

    def close(self) -> None:
        for job in self._running:
            job.cancel()


class TimedJob:
    """`ends`: clock seconds."""

    def __init__(self, clock: Clock, ends: float, value: Any) -> None:
        self.ends = ends
        self._clock = clock
        self._value = value
        self._cancelled = False

    def done(self) -> bool:
        return self._cancelled or self._clock.time() >= self.ends

    def result(self) -> Any:
        if self._cancelled:
            raise CancelledError
        return self._value

    def cancel(self) -> None:
        """It ends now, without its data, unless it had ended before."""
        self._cancelled = not self.done()


def make_transfers(clock: Clock, workers: int, bytes_per_s: float) -> Transfers:
    """Threads, or on a virtual clock `workers` lanes of `bytes_per_s` each."""
    if clock.virtual:
        return TimedTransfers(clock, bytes_per_s, workers)
    return TransferPool(workers)
