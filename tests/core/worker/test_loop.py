"""The engine thread, driven without sockets."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from bien.core.errors import ExecutorDiedError
from bien.core.kv.events import KVEvent
from bien.core.report import StepReport
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.loop import EngineThread
from bien.core.worker.messages import WorkerStats
from tests.core.worker.fake_engine import FakeEngine, FakeExecutor


class Heard:
    def __init__(self) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.outputs: dict[str, list[Any]] = {}

    def on_report(self, report: StepReport, stats: WorkerStats) -> None:
        self.events.put(("report", report, stats))

    def on_refused(self, id: str, error: Exception) -> None:
        self.events.put(("refused", id, error))

    def on_snapshot(self, client: int, events: list[KVEvent]) -> None:
        self.events.put(("snapshot", client, events))

    def on_stop(self, error: BaseException | None) -> None:
        self.events.put(("stop", error))

    def next(self, kind: str) -> tuple[Any, ...]:
        while True:
            event = self.events.get(timeout=10)
            if event[0] == "report":
                for output in event[1].outputs:
                    self.outputs.setdefault(output.id, []).append(output)
            if event[0] == kind:
                return event

    def until_finished(self, *ids: str) -> None:
        while not all(i in self.outputs and self.outputs[i][-1].finish for i in ids):
            self.next("report")


class Driven:
    def __init__(self, depth: int = 2, threaded: bool = True) -> None:
        self.engine, self.executor, self.heard = FakeEngine(), FakeExecutor(threaded), Heard()
        self.thread = EngineThread(self.engine, self.executor, self.heard, depth=depth)  # type: ignore[arg-type]

    def __enter__(self) -> Driven:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.stop()
        self.thread.join(10)
        assert self.engine.closed
        assert self.executor.closed

    def submit(self, id: str, tokens: int = 3, tenant: str = "", session: str = "") -> None:
        sampling = SamplingParams(max_tokens=tokens)
        prompt = TokenIds.of(range(5))
        self.thread.submit(GenerateRequest(id, prompt, sampling, tenant=tenant, session=session))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("threaded", [True, False])
def test_requests_run_to_their_end(depth: int, threaded: bool) -> None:
    with Driven(depth, threaded) as d:
        d.submit("a", 3)
        d.submit("b", 5)
        d.heard.until_finished("a", "b")
    assert [int.from_bytes(o.tokens, "little") for o in d.heard.outputs["b"]] == [5, 6, 7, 8, 9]
    assert len(d.heard.outputs["a"]) == 3


@pytest.mark.parametrize(
    ("depth", "threaded", "overlaps"), [(1, True, False), (2, True, True), (2, False, False)]
)
def test_steps_overlap_only_while_the_executor_works(depth: int, threaded: bool, overlaps: bool) -> None:
    with Driven(depth, threaded) as d:
        d.submit("a", 10, session="slow")
        d.heard.until_finished("a")
    assert len(d.heard.outputs["a"]) == 10
    assert bool(d.executor.overlaps) is overlaps


def test_one_report_per_step_and_stats_are_copies() -> None:
    with Driven() as d:
        d.submit("a", 4)
        seen: list[WorkerStats] = []
        while not seen or seen[-1].steps < 4:
            seen.append(d.heard.next("report")[2])
    assert [s.steps for s in seen if s.steps] == [1, 2, 3, 4]


def test_a_failing_step_ends_its_requests_only() -> None:
    with Driven() as d:
        d.submit("bad", 5, tenant="fails")
        d.heard.until_finished("bad")
        d.submit("good", 3)
        d.heard.until_finished("good")
    [output] = d.heard.outputs["bad"]
    assert (output.finish, output.error) == ("error", "step failed: the kernel crashed")
    assert len(d.heard.outputs["good"]) == 3


def test_refusals_are_told() -> None:
    with Driven() as d:
        d.submit("a", 1000, session="slow")
        d.submit("a", 1)
        _, id, error = d.heard.next("refused")
        assert id == "a"
        assert "already running" in str(error)
        d.thread.abort("a")
        d.submit("b", 1)
        d.heard.until_finished("b")
        assert d.engine.log == ["abort a"]


def test_snapshot_follows_every_report_before_it() -> None:
    with Driven() as d:
        d.submit("a", 1)
        d.heard.until_finished("a")
        d.thread.snapshot(7)
        _, client, events = d.heard.next("snapshot")
    assert client == 7
    assert len(events) == 1


def test_an_idle_thread_does_not_look_for_work() -> None:
    with Driven() as d:
        d.submit("a", 1)
        d.heard.until_finished("a")
        looks = []
        d.engine.begin = lambda: looks.append(1)  # type: ignore[method-assign]
        time.sleep(0.05)
    assert len(looks) <= 2


def test_loads_are_polled() -> None:
    with Driven() as d:
        begin, looks = d.engine.begin, []

        def loading() -> Any:
            looks.append(1)
            d.engine.loading = len(looks) < 5
            return None if d.engine.loading else begin()

        d.engine.loading = True
        d.engine.begin = loading  # type: ignore[method-assign]
        d.submit("a", 1)
        d.heard.until_finished("a")
    assert len(looks) >= 5


def test_integrity_is_checked_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIEN_CHECK", "1")
    with Driven() as d:
        d.submit("a", 2)
        d.heard.until_finished("a")
        d.thread.snapshot(0)
        d.heard.next("snapshot")
    assert "checked" in d.engine.log


def test_a_broken_engine_stops_the_thread_and_says_so() -> None:
    with Driven() as d:
        d.engine.finish = lambda result: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        d.submit("a", 2)
        [_, error] = d.heard.next("stop")
    assert isinstance(error, ZeroDivisionError)


def test_stop_waits_for_steps_in_flight() -> None:
    with Driven() as d:
        d.submit("a", 1000, session="slow")
        d.heard.next("report")
        d.thread.stop()
        assert d.heard.next("stop") == ("stop", None)


class DyingExecutor(FakeExecutor):
    """A group whose rank dies when it is told to: between steps, or in one."""

    def __init__(self) -> None:
        super().__init__(threaded=False)
        self.on_death: Any = None
        self.dead = False

    def watch(self, on_death: Any) -> None:
        self.on_death = on_death

    def forward(self, plan: Any) -> Any:
        if self.dead:
            raise ExecutorDiedError("rank 1 was killed")
        return super().forward(plan)


@pytest.mark.parametrize("idle", [True, False])
def test_the_thread_ends_with_its_executor(idle: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Requests are not ended one by one: the whole worker is, so that they are placed again."""
    executor, heard = DyingExecutor(), Heard()
    engine = FakeEngine()
    thread = EngineThread(engine, executor, heard)  # type: ignore[arg-type]
    thread.start()
    if idle:
        executor.on_death(ExecutorDiedError("rank 1 was killed"))
    else:
        executor.dead = True
        thread.submit(GenerateRequest("a", TokenIds.of([1]), SamplingParams(max_tokens=3)))
    error = heard.next("stop")[1]
    assert isinstance(error, ExecutorDiedError)
    assert str(error) == "rank 1 was killed"
    assert "a" not in heard.outputs
    assert engine.closed and executor.closed
    assert [r.getMessage() for r in caplog.records] == ["rank 1 was killed; this worker stops"]
    assert not any(r.exc_info for r in caplog.records)
    thread.join(10)
