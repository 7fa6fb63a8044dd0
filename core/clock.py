"""Time, real or virtual. Every room reads time and sleeps through a `Clock` and through nothing else.

`VirtualClock` is an asyncio loop whose selector adds the timeout to `loop.time()` instead of waiting,
so a simulation runs the very coroutines that serve live traffic.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time as _time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
MAX_WAIT = 24 * 3600.0  # seconds, of one wait of an asyncio loop


class Clock(Protocol):
    """Monotonic seconds and sleeping."""

    def time(self) -> float:
        """Monotonic seconds from an arbitrary start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling coroutine for `seconds` of this clock."""
        ...

    @property
    def virtual(self) -> bool:
        """Whether waiting costs no real time."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    virtual = False

    def time(self) -> float:
        return _time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def epoch(self) -> float:
        """Seconds since 1970, for what is written down for others (results, `created` fields)."""
        return _time.time()

    def block(self, seconds: float) -> None:
        """Suspend the calling thread; never one that runs an event loop."""
        _time.sleep(seconds)


def tolerance(now: float) -> float:
    """Seconds that two times near `now` may differ by rounding alone."""
    return 1e-9 + abs(now) * 1e-15


_running = threading.local()  # `selector`: of the loop of `VirtualClock.run`, in its thread


class _JumpingSelector(selectors.SelectSelector):
    """Returns at once; a wait of `timeout` seconds is booked as virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_timer: Callable[[], float | None] = lambda: None
        self.moved: Callable[[float], None] = lambda now: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("virtual time stands still: every coroutine waits for another one (deadlock)")
        if timeout >= MAX_WAIT and (when := self.next_timer()) is not None:
            self.now = max(self.now, when)  # asyncio waits a day at most; a trace may hold longer gaps
            self.moved(self.now)
        elif timeout > 0:
            self.now += timeout
            self.moved(self.now)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time. No sockets, no threads: they would never be polled."""

    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        super().__init__(self.jumping)
        self.jumping.next_timer = self._next_timer
        self.jumping.moved = self._moved
        self._moved(0.0)

    def time(self) -> float:
        return self.jumping.now

    def _moved(self, now: float) -> None:
        # Rounding must never leave a timer a hair in the future of the wait that was for it.
        self._clock_resolution = tolerance(now)

    def _next_timer(self) -> float | None:
        scheduled = getattr(self, "_scheduled", None)  # asyncio's own heap of timers
        return scheduled[0].when() if scheduled else None


class VirtualClock:
    """Seconds of the running `VirtualLoop`; starts at 0."""

    virtual = True

    def time(self) -> float:
        # To ask asyncio for the running loop costs a system call, and time is read without end.
        selector: _JumpingSelector | None = getattr(_running, "selector", None)
        return asyncio.get_running_loop().time() if selector is None else selector.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    @staticmethod
    def run(main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end on a fresh virtual loop and return its result."""
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            before, _running.selector = getattr(_running, "selector", None), loop.jumping
            try:
                return runner.run(main)
            finally:
                _running.selector = before
