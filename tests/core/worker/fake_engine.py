"""A scripted engine and executor: the engine's signatures, a token per step, no model.

Token i of a request is its prompt length + i. A request of tenant "fails" fails its step in the executor;
one of session "slow" makes each of its steps take `SLOW` seconds.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from bien.core.errors import ContextLengthError, ModelError, UserError
from bien.core.kv.events import KVEvent
from bien.core.plan import ExecutorPlan, StepResult, i32
from bien.core.report import SequenceOutput, StepReport
from bien.core.request import GenerateRequest, TokenIds
from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.core.worker.start import WorkerStart

SLOW = 0.01
MAX_CONTEXT = 300_000


class FakeEngine:
    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.closed = False
        self.loading = False
        self.log: list[str] = []
        self._live: dict[str, GenerateRequest] = {}
        self._made: dict[str, int] = {}  # tokens confirmed
        self._promised: dict[str, int] = {}
        self._flights: deque[tuple[int, list[str]]] = deque()
        self._cached: dict[bytes, None] = {}
        self._events: list[KVEvent] = []
        self._stats = WorkerStats(total_blocks=slots)
        self._step = 0

    def submit(self, request: GenerateRequest) -> None:
        if request.id in self._live:
            raise UserError(f"request id {request.id!r} is already running", field="id")
        if request.prompt_tokens + request.sampling.max_tokens > MAX_CONTEXT:
            raise ContextLengthError(f"{request.prompt_tokens} tokens do not fit into {MAX_CONTEXT}")
        if isinstance(request.prompt, TokenIds) and request.tenant == "checked":
            assert list(request.prompt.ids()) == list(range(request.prompt_tokens)), "prompt arrived damaged"
        self._live[request.id] = request
        self._made[request.id] = self._promised[request.id] = 0

    def abort(self, id: str) -> None:
        if self._live.pop(id, None) is not None:
            self.log.append(f"abort {id.split('#')[0]}")

    def begin(self) -> ExecutorPlan | None:
        ids = [i for i, r in self._live.items() if self._promised[i] < r.sampling.max_tokens][: self.slots]
        if not ids:
            return None
        self._step += 1
        for id in ids:
            self._promised[id] += 1
        self._flights.append((self._step, ids))
        one = np.ones(len(ids), dtype=np.int32)
        plan = ExecutorPlan(self._step, one, one, one, one * 0, one)
        # How the fake executor learns what to do; a real one has slots for that.
        plan.new = [self._live[id] for id in ids]  # type: ignore[misc]
        return plan

    def finish(self, result: StepResult) -> StepReport:
        step, ids = self._flights.popleft()
        assert step == result.step
        report = StepReport()
        for id in ids:
            request = self._live.get(id)
            if request is None:
                continue
            made = self._made[id] = self._made[id] + 1
            token = (request.prompt_tokens + made - 1).to_bytes(4, "little")
            finish = "length" if made == request.sampling.max_tokens else None
            report.outputs.append(SequenceOutput(id, 1, token, finish, cached=0 if made == 1 else -1))
            if finish:
                self._end(id)
        report.events, self._events = self._events, []
        self._stats.steps += 1
        self._stats.output_tokens += len(report.outputs)
        return report

    def fail(self, step: int, error: BaseException) -> StepReport:
        flight, ids = self._flights.popleft()
        assert flight == step
        live = [id for id in ids if self._live.pop(id, None) is not None]
        text, code = f"step failed: {error}", getattr(error, "code", "internal_error")
        return StepReport([SequenceOutput(id, 0, b"", "error", error=text, error_code=code) for id in live])

    def flush(self) -> StepReport:
        events, self._events = self._events, []
        return StepReport([], events)

    @property
    def busy(self) -> bool:
        return bool(self._live or self._flights)

    def stats(self) -> WorkerStats:
        self._stats.running = len(self._live)
        self._stats.cached_blocks = len(self._cached)
        return self._stats

    def snapshot(self) -> list[KVEvent]:
        return [KVEvent("stored", hashes=key) for key in self._cached]

    def check_integrity(self) -> None:
        assert not self._live
        assert not self._flights
        self.log.append("checked")

    def close(self) -> None:
        self._live.clear()
        self.closed = True

    def _end(self, id: str) -> None:
        del self._live[id]
        key = len(self._cached).to_bytes(16, "little")
        self._cached[key] = None
        self._events.append(KVEvent("stored", hashes=key))


class FakeExecutor:
    """Computes on a thread of its own (`threaded`), or inside `sample`."""

    groups = ()
    io: Any = None

    def __init__(self, threaded: bool = True) -> None:
        self.closed = False
        self.overlaps = 0  # forwards that were issued while an older step was not done
        self._pool = ThreadPoolExecutor(1) if threaded else None
        self._last: Future[StepResult] | None = None

    def allocate(self, blocks: tuple[int, ...], slots: int, max_context: int) -> None: ...

    def forward(self, plan: ExecutorPlan) -> ExecutorPlan:
        if any(request.tenant == "fails" for request in _requests(plan)):
            raise RuntimeError("the kernel crashed")
        self.overlaps += self._last is not None and not self._last.done()
        return plan

    def sample(self, handle: ExecutorPlan, masks: Any = None) -> Future[StepResult]:
        if self._pool is not None:
            self._last = self._pool.submit(self._compute, handle)
        else:
            self._last = Future()
            self._last.set_result(self._compute(handle))
        return self._last

    def close(self) -> None:
        self.closed = True
        if self._pool is not None:
            self._pool.shutdown()

    def _compute(self, plan: ExecutorPlan) -> StepResult:
        if any(request.session == "slow" for request in _requests(plan)):
            time.sleep(SLOW)
        return StepResult(plan.step, i32([1] * plan.rows), i32([0] * plan.rows))


def _requests(plan: ExecutorPlan) -> list[GenerateRequest]:
    return plan.new  # type: ignore[return-value]


def info(id: str = "w0", epoch: int = 0) -> WorkerInfo:
    return WorkerInfo(id, f"{os.getpid()}-{epoch}", "fake", max_context=MAX_CONTEXT, slots=4, pid=os.getpid())


def build(start: WorkerStart, progress: Callable[[str], None]) -> SimpleNamespace:
    """A builder for worker processes; `start.model.name` scripts how it goes."""
    progress("making a fake engine")
    match start.model.name:
        case "missing":
            raise ModelError("model folder 'missing' lacks config.json", field="model.name")
        case "crash":
            os.abort()
        case "bug":
            raise ZeroDivisionError("a bug")
        case "hang":
            time.sleep(60)
    print("a stray print must not disturb the parent")
    return SimpleNamespace(
        engine=FakeEngine(),
        executor=FakeExecutor(),
        info=info(start.id, start.epoch),
        parts=SimpleNamespace(close=lambda: None),
        others=(),
        depth=2,
    )
