"""A worker in the gateway's own process: timers of the running loop drive the engine on a clock.

With a simulated executor on a virtual clock, steps that repeat are skipped in one jump. A jump is cut
where something arrives: the steps whose time has passed are settled (`catch_up`), the one under way ends
at its own time, and only then the arrival is seen: exactly as if every step had been taken.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.clock import Clock, tolerance
from bien.core.engine import Engine
from bien.core.errors import BienError
from bien.core.executors.base import Executor
from bien.core.plan import StepResult
from bien.core.report import StepReport
from bien.core.request import GenerateRequest
from bien.core.worker.client import WorkerListener
from bien.core.worker.mapping import FrameMaker, RequestMap, error_output
from bien.core.worker.messages import Snapshot, StepFrame, WorkerInfo, WorkerStats

log = logging.getLogger("bien.worker")


class InProcessClient:
    """Implements `WorkerClient` around an engine and its executor, which it owns."""

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        executor: Executor,
        clock: Clock,
        *,
        jump: bool = True,
        dp_rank: int = 0,
    ) -> None:
        self.info = info
        self.engine = engine
        self._executor = executor
        self._clock = clock
        self._jump = jump and clock.virtual
        self._simulated = bool(getattr(executor, "simulated", False))
        self._step = getattr(executor, "step", None) if self._simulated else None
        self._growing = getattr(executor, "growing", None)  # costs of the steps of a jump
        if self._simulated and self._jump:
            engine.leave_out_tables()
        self._listener: WorkerListener | None = None
        self._inbox: list[Callable[[], None]] = []
        self.alive = True  # written here only
        self._requests = RequestMap()
        self._frames = FrameMaker(info.id, info.generation, dp_rank)
        self._stats = WorkerStats()  # as last sent
        self._flight: _Flight | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # set by `attach`
        self._timer: asyncio.Handle | None = None  # of what comes next; None: nothing until a request does

    # -- WorkerClient

    def attach(self, listener: WorkerListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._go)

    def submit(self, rid: int, request: GenerateRequest) -> None:
        self._post(lambda: self._accept(rid, request))

    def abort(self, rid: int) -> None:
        if not self.alive:
            return
        self.catch_up()  # what it gained until now was gained before
        id = self._requests.remove(0, rid)  # the step under way has no output for it any more
        self._post(lambda: self._drop(rid) if id is None else self.engine.abort(id))

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        self.catch_up()
        self._emit(self.engine.flush())
        return self._frames.snapshot(self.engine.snapshot())

    def catch_up(self) -> None:
        flight = self._flight
        if flight is None or flight.steps <= 1:
            return
        now = self._clock.time()
        done = flight.done(now - flight.start + tolerance(now))
        # The last step of a jump is settled by its own timer: it may finish sequences.
        done = min(done, flight.steps - 1)
        if done >= 1:
            seconds = flight.elapsed(done)
            report = self.engine.advance(flight.result, done, seconds)
            times = flight.start + flight.seconds, flight.start + seconds
            flight.advance(done)
            self._emit(report, times)

    async def close(self) -> None:
        if not self.alive:
            return
        self._stop()
        self.engine.close()
        self._executor.close()

    def kill(self, reason: str = "killed") -> None:
        """Die without a word, as a crashed process does (for tests and failure models)."""
        if self.alive:
            self._stop()
            if self._listener is not None:
                self._listener.on_death(self, reason)

    def silence(self) -> None:
        """Die, and tell nobody."""
        if self.alive:
            self._stop()

    def _stop(self) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()

    # -- driver

    def _go(self) -> None:
        """Take what has come, and begin a step: `_land` ends it."""
        try:
            self._begin()
        except Exception as error:
            self._failed(error)

    def _land(self) -> None:
        """The flight's time has passed."""
        flight, self._flight = self._flight, None
        assert flight is not None
        try:
            self._settle(flight)
            if self.alive:
                self._begin()
        except Exception as error:
            self._failed(error)

    def _begin(self) -> None:
        loop = self._loop
        assert loop is not None
        while True:
            inbox, self._inbox = self._inbox, []
            for act in inbox:
                act()
            flight = self._flight = self._issue(self._clock.time())
            if flight is not None:
                if self._simulated:
                    self._timer = loop.call_at(flight.end, self._land)
                else:
                    self._timer = loop.call_soon(self._land)  # a real step held the loop: let others run
                return
            self._emit(self.engine.flush())
            if not self._inbox:
                break
        self._timer = loop.call_later(0.001, self._go) if self.engine.loading else None

    def _failed(self, error: Exception) -> None:
        # A fault of our own: to the gateway this worker has died.
        log.error("worker %s failed", self.info.id, exc_info=error)
        self.kill(f"{type(error).__name__}: {error}")

    def _issue(self, start: float) -> _Flight | None:
        plan = self.engine.begin()
        if plan is None:
            return None
        handle = self._executor.forward(plan)
        if not self._simulated:
            return _Flight(start, 0.0, 1, self._executor.sample(handle).result())
        steps = self.engine.jumpable() if self._jump else 1
        ends = first = None
        if steps > 1 and self._growing is not None:
            costs = self._growing(plan, steps)
            first, ends = float(costs[0]), np.cumsum(costs)
        if self._step is None:
            result = self._executor.sample(handle).result()
        else:
            result = self._step(handle, first)
        return _Flight(start, result.seconds, steps, result, ends)

    def _settle(self, flight: _Flight) -> None:
        seconds = flight.elapsed(flight.steps)
        report = self.engine.finish_many(flight.result, flight.steps, seconds if self._simulated else None)
        times = None
        if flight.steps > 1:
            times = flight.start + flight.seconds, flight.start + seconds
        self._emit(report, times)

    def _post(self, act: Callable[[], None]) -> None:
        if not self.alive:
            return
        self.catch_up()
        self._inbox.append(act)
        flight, loop = self._flight, self._loop
        if loop is None:
            return
        if self._timer is None:
            self._timer = loop.call_soon(self._go)
        elif flight is not None and flight.steps > 1:
            flight.steps = 1
            self._timer.cancel()
            self._timer = loop.call_at(flight.end, self._land)

    def _accept(self, rid: int, request: GenerateRequest) -> None:
        try:
            self.engine.submit(self._requests.add(0, rid, request))
        except BienError as error:
            self._drop(rid)
            self._send(StepFrame(outputs=[error_output(rid, error)], time=self._clock.time()))

    def _drop(self, rid: int) -> None:
        id = self._requests.remove(0, rid)
        if id is not None:
            self.engine.abort(id)

    def _emit(self, report: StepReport, times: tuple[float, float] | None = None) -> None:
        stats = self.engine.stats()
        if not report and stats == self._stats:
            return
        self._stats = copy(stats)  # the engine goes on counting in its own
        frame = self._frames.frames(report, self._stats, (0,), self._requests, self._clock.time())[0]
        if times is not None:
            for output in frame.outputs:
                output.times = times
        self._send(frame)

    def _send(self, frame: StepFrame) -> None:
        if self._listener is not None and self.alive:
            self._listener.on_frame(self, frame)


class _Flight:
    """`steps` steps of the same rows, under way since `start`. The first takes `seconds`, and so do the
    others unless `ends` says when each ends, in seconds from `start`."""

    __slots__ = ("ends", "result", "seconds", "start", "steps")

    def __init__(
        self, start: float, seconds: float, steps: int, result: StepResult, ends: NDArray[Any] | None = None
    ) -> None:
        self.start = start
        self.seconds = seconds
        self.steps = steps
        self.result = result
        self.ends = ends

    @property
    def end(self) -> float:
        return self.start + self.elapsed(self.steps)

    def elapsed(self, steps: int) -> float:
        """Seconds from `start` to the end of so many steps."""
        return steps * self.seconds if self.ends is None else float(self.ends[steps - 1])

    def done(self, seconds: float) -> int:
        """Steps that end within so many seconds from `start`."""
        if self.ends is None:
            return math.floor(seconds / self.seconds)
        return int(self.ends.searchsorted(seconds, side="right"))

    def advance(self, steps: int) -> None:
        """The first `steps` steps have been settled."""
        passed = self.elapsed(steps)
        self.start += passed
        self.steps -= steps
        if self.ends is not None:
            self.ends = self.ends[steps:] - passed
            self.seconds = float(self.ends[0])
