"""A worker in the gateway's own process: one coroutine drives the engine on a clock.

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
        self, info: WorkerInfo, engine: Engine, executor: Executor, clock: Clock, *, jump: bool = True
    ) -> None:
        self.info = info
        self.engine = engine
        self._executor = executor
        self._clock = clock
        self._jump = jump and clock.virtual
        self._simulated = bool(getattr(executor, "simulated", False))
        self._step = getattr(executor, "step", None) if self._simulated else None
        self._growing = getattr(executor, "growing", None)  # costs of the steps of a jump
        self._listener: WorkerListener | None = None
        self._inbox: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._alive = True
        self._requests = RequestMap()
        self._frames = FrameMaker(info.id, info.generation)
        self._stats = WorkerStats()  # as last sent
        self._flight: _Flight | None = None
        self._task: asyncio.Task[None] | None = None

    # -- WorkerClient

    @property
    def alive(self) -> bool:
        return self._alive

    def attach(self, listener: WorkerListener) -> None:
        self._listener = listener
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"worker {self.info.id}")
        self._task.add_done_callback(self._ended)

    def submit(self, rid: int, request: GenerateRequest) -> None:
        self._post(lambda: self._accept(rid, request))

    def abort(self, rid: int) -> None:
        if not self._alive:
            return
        self.catch_up()  # what it gained until now was gained before
        id = self._requests.remove(0, rid)  # the step under way has no output for it any more
        self._post(lambda: self._drop(rid) if id is None else self.engine.abort(id))

    async def snapshot(self) -> Snapshot:
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
            self._settle(flight, done, late=True)
            self._flight = self._issue(flight.start + flight.elapsed(done))
            assert self._flight is not None, "a stationary scheduler planned nothing"
            self._flight.steps = min(self._flight.steps, flight.steps - done)
            self._flight.timer = flight.timer

    async def close(self) -> None:
        if not self._alive:
            return
        self._alive = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.engine.close()
        self._executor.close()

    def kill(self, reason: str = "killed") -> None:
        """Die without a word, as a crashed process does (for tests and failure models)."""
        if self._alive:
            self._alive = False
            if self._task is not None:
                self._task.cancel()
            if self._listener is not None:
                self._listener.on_death(self, reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a fault of our own: to the gateway this worker has died
            log.error("worker %s failed", self.info.id, exc_info=error)
            self.kill(f"{type(error).__name__}: {error}")

    # -- driver

    async def _run(self) -> None:
        while True:
            inbox, self._inbox = self._inbox, []
            for act in inbox:
                act()
            self._wake.clear()
            self._flight = self._issue(self._clock.time())
            if self._flight is not None:
                await self._elapse()
                continue
            self._emit(self.engine.flush())
            if self._inbox:
                continue
            if self.engine.loading:
                await self._clock.sleep(0.001)
            else:
                await self._wake.wait()

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

    async def _elapse(self) -> None:
        """Wait until the flight's time has passed, then settle it. Arrivals may shorten it meanwhile."""
        while True:
            flight = self._flight
            assert flight is not None
            end = flight.start + flight.elapsed(flight.steps)
            wait = end - self._clock.time()
            if wait <= tolerance(end):
                break
            assert self._task is not None
            loop = self._task.get_loop()
            timer = flight.timer = loop.create_future()
            handle = loop.call_later(wait, _ring, timer)
            await timer
            handle.cancel()
        if not self._simulated:
            await asyncio.sleep(0)  # a real step held the loop: let others run
        self._settle(flight, flight.steps)
        self._flight = None

    def _settle(self, flight: _Flight, steps: int, late: bool = False) -> None:
        seconds = flight.elapsed(steps)
        report = self.engine.finish_many(flight.result, steps, seconds if self._simulated else None)
        times = None
        if steps > 1 or late:
            times = flight.start + flight.seconds, flight.start + seconds
        self._emit(report, times)

    def _post(self, act: Callable[[], None]) -> None:
        if not self._alive:
            return
        self.catch_up()
        self._inbox.append(act)
        self._wake.set()
        if self._flight is not None and self._flight.steps > 1:
            self._flight.steps = 1
            if self._flight.timer is not None:
                _ring(self._flight.timer)

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
        if self._listener is not None and self._alive:
            self._listener.on_frame(self, frame)


def _ring(timer: asyncio.Future[None]) -> None:
    if not timer.done():
        timer.set_result(None)


class _Flight:
    """`steps` steps of the same rows, under way since `start`. The first takes `seconds`, and so do the
    others unless `ends` says when each ends, in seconds from `start`."""

    __slots__ = ("ends", "result", "seconds", "start", "steps", "timer")

    def __init__(
        self, start: float, seconds: float, steps: int, result: StepResult, ends: NDArray[Any] | None = None
    ) -> None:
        self.start = start
        self.seconds = seconds
        self.steps = steps
        self.result = result
        self.ends = ends
        self.timer: Any = None

    def elapsed(self, steps: int) -> float:
        """Seconds from `start` to the end of so many steps."""
        return steps * self.seconds if self.ends is None else float(self.ends[steps - 1])

    def done(self, seconds: float) -> int:
        """Steps that end within so many seconds from `start`."""
        if self.ends is None:
            return math.floor(seconds / self.seconds)
        return int(self.ends.searchsorted(seconds, side="right"))
