"""`EngineThread`: the one thread that calls an engine and its executor."""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from bien.core.engine import Engine
from bien.core.errors import ExecutorDiedError
from bien.core.executors.base import Executor
from bien.core.kv.events import KVEvent
from bien.core.plan import ExecutorPlan, StepResult
from bien.core.report import StepReport
from bien.core.request import GenerateRequest
from bien.core.worker.messages import WorkerStats
from bien.core.worker.step_log import StepLog

LOAD_POLL = 0.001  # seconds between looks at transfers that run
STALL_POLL = 0.02  # the same while the scheduler has sequences and plans none of them
log = logging.getLogger("bien.worker")


class EngineListener(Protocol):
    """Hears of everything an `EngineThread` does. Called on that thread, in order; must not block."""

    def on_report(self, report: StepReport, stats: WorkerStats) -> None:
        """A step ended, or something happened outside of one. `stats` is a copy."""
        ...

    def on_refused(self, id: str, error: Exception) -> None:
        """`submit` raised."""
        ...

    def on_snapshot(self, client: int, events: list[KVEvent]) -> None:
        """All cached blocks, after every event that was reported so far."""
        ...

    def on_stop(self, error: BaseException | None) -> None:
        """The thread has ended and closed engine and executor; None: because `stop` was called."""
        ...


class EngineThread:
    """Drives an engine. The public methods may be called from any thread and return at once."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        listener: EngineListener,
        *,
        depth: int = 2,
        steps: StepLog | None = None,
    ) -> None:
        """`depth`: steps in flight at most; beyond one only while the executor has not finished. `steps`:
        closed by this thread's end."""
        self._engine = engine
        self._executor = executor
        self._listener = listener
        self._depth = depth
        self._steps = steps
        self._check = os.environ.get("BIEN_CHECK") == "1"
        self._inbox: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self._flight: deque[tuple[int, Future[StepResult]]] = deque()  # oldest first
        self._stalled = False  # the last look for a plan found none, with nothing in flight
        self._stopping = False
        self.received = 0  # requests that the engine was given; written and read on the engine thread
        self._sent = WorkerStats()  # the newest that was reported
        self._told = 0  # of `received`, as of then
        self._thread = threading.Thread(target=self._run, name="bien-engine", daemon=True)

    def start(self) -> None:
        watch = getattr(self._executor, "watch", None)
        if watch is not None:
            watch(lambda error: self._inbox.put((self._die, (error,))))
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        self._inbox.put((self._submit, (request,)))

    def abort(self, id: str) -> None:
        self._inbox.put((self._engine.abort, (id,)))

    def snapshot(self, client: int) -> None:
        """Answered by `on_snapshot`."""
        self._inbox.put((self._snapshot, (client,)))

    def stop(self) -> None:
        """Let the steps in flight end, then close engine and executor. Answered by `on_stop`."""
        self._inbox.put((self._stop, ()))

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    # Below: on the engine thread only.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopping:
                self._turn()
        except ExecutorDiedError as fault:
            log.error("%s; this worker stops", fault)
            error = fault
        except BaseException as fault:  # a bug in the engine itself: nothing it says can be trusted now
            log.exception("the engine failed; this worker stops")
            error = fault
        try:
            self._close()
        except Exception as fault:
            log.exception("closing the engine failed")
            error = error or fault
        self._listener.on_stop(error)

    def _turn(self) -> None:
        self._drain()
        steps, began = self._steps, time.monotonic()
        while self._hungry() and (plan := self._engine.begin()) is not None:
            if steps is not None:
                steps.began(began, plan)
            self._flight.append((plan.step, self._issue(plan)))
            began = time.monotonic()
        self._stalled = not self._flight
        if self._flight:
            step, future = self._flight.popleft()
            self._emit(self._commit(step, future), step=True)
            if steps is not None:
                steps.ended(time.monotonic(), step)
        else:
            self._emit(self._engine.flush())

    def _hungry(self) -> bool:
        """Whether to look for one more plan: not while a result lies ready to be reported."""
        if self._stopping or len(self._flight) >= self._depth:
            return False
        return not (self._flight and self._flight[0][1].done())

    def _issue(self, plan: ExecutorPlan) -> Future[StepResult]:
        try:
            return self._executor.sample(self._executor.forward(plan))
        except ExecutorDiedError:
            raise
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def _commit(self, step: int, future: Future[StepResult]) -> StepReport:
        try:
            result = future.result()
        except ExecutorDiedError:
            raise
        except Exception as error:
            log.error("step %d failed; its requests end with an error", step, exc_info=error)
            if self._steps is not None:
                self._steps.failed(step)
            return self._engine.fail(step, error)
        return self._engine.finish(result)

    def _drain(self) -> None:
        """Obey the inbox; wait for it only when there is nothing else to do."""
        wait = self._patience()
        try:
            while True:
                call, arguments = self._inbox.get(block=wait != 0, timeout=wait)
                call(*arguments)
                wait = 0
        except queue.Empty:
            pass

    def _patience(self) -> float | None:
        if self._flight or not self._stalled:
            return 0
        if self._engine.busy:
            return LOAD_POLL if self._engine.loading else STALL_POLL
        if self._check:
            self._engine.check_integrity()
        return None

    def _emit(self, report: StepReport, step: bool = False) -> None:
        stats = self._engine.stats()
        heard = self.received != self._told  # some may have left as they came
        if step or heard or report.outputs or report.events or stats != self._sent:
            self._sent = copy.copy(stats)  # engines may go on counting in the one they returned
            self._told = self.received
            self._listener.on_report(report, self._sent)

    def _submit(self, request: GenerateRequest) -> None:
        self.received += 1
        try:
            self._engine.submit(request)
        except Exception as error:
            self._listener.on_refused(request.id, error)

    def _snapshot(self, client: int) -> None:
        self._emit(self._engine.flush())
        self._listener.on_snapshot(client, self._engine.snapshot())

    def _stop(self) -> None:
        self._stopping = True

    def _die(self, error: ExecutorDiedError) -> None:
        raise error

    def _close(self) -> None:
        while self._flight:
            _, future = self._flight.popleft()
            future.exception()
        try:
            self._engine.close()
        finally:
            if self._steps is not None:
                self._steps.close()
            self._executor.close()
