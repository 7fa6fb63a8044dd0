"""`EngineRank`: one engine of a worker, as the event loop knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from bien.core.errors import ExecutorDiedError
from bien.core.kv.events import KVEvent
from bien.core.report import StepReport
from bien.core.worker.loop import EngineThread
from bien.core.worker.mapping import FrameMaker
from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.core.worker.newest import Newest

STOPPED = "stopped"  # the reason of an end that was asked for


class RankListener(Protocol):
    """Hears of all engines of a worker, on the event loop."""

    def report(self, rank: EngineRank, report: StepReport, stats: WorkerStats, received: int) -> None: ...
    def refused(self, rank: EngineRank, id: str, error: Exception) -> None: ...
    def snapshot(self, rank: EngineRank, client: int, events: list[KVEvent]) -> None: ...
    def ended(self, rank: EngineRank, reason: str) -> None: ...


class EngineRank:
    """Is the `EngineListener` of its engine thread, and hands on what it hears."""

    def __init__(self, info: WorkerInfo, number: int, listener: RankListener) -> None:
        """Inside the running loop. `engine` is set before it is used."""
        self.number = number  # its dp_rank
        self.engine: EngineThread
        self.frames = FrameMaker(info.id, info.generation, number)
        self.stats = WorkerStats()  # the newest
        self.newest = Newest()
        self._listener = listener
        self._loop = asyncio.get_running_loop()

    # EngineListener: on the engine thread.

    def on_report(self, report: StepReport, stats: WorkerStats) -> None:
        received = self.engine.received
        self._later(lambda: self._listener.report(self, report, stats, received))

    def on_refused(self, id: str, error: Exception) -> None:
        self._later(lambda: self._listener.refused(self, id, error))

    def on_snapshot(self, client: int, events: list[KVEvent]) -> None:
        self._later(lambda: self._listener.snapshot(self, client, events))

    def on_stop(self, error: BaseException | None) -> None:
        reason = STOPPED if error is None else f"engine failed: {type(error).__name__}: {error}"
        if isinstance(error, ExecutorDiedError):
            reason = str(error)
        self._later(lambda: self._listener.ended(self, reason))

    def _later(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            pass
