"""What a simulation shows: a bar over turns, and how much faster than real time it runs."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bien.core.clock import WallClock
from bien.replay.driver import Driver
from bien.replay.traces import Survey


class SimulationDisplay:
    """Use as a context manager; `tick` is called as virtual time goes by."""

    def __init__(self, survey: Survey, console: Console | None = None) -> None:
        self._survey = survey
        self._clock = WallClock()
        self._start = self._clock.time()
        self._bar = Progress(
            TextColumn("turns"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console or Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("turns", total=None, speed="")
        self._known = False

    def __enter__(self) -> SimulationDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tick(self, driver: Driver) -> None:
        if not self._known:
            self._known = True
            total = self._survey.totals(driver.target.info.max_context).turns
            self._bar.update(self._task, total=total or None)
        wall = max(1e-6, self._clock.time() - self._start)
        speed = f"{driver.clock.time() - driver.started:,.0f} s in {wall:.1f} s"
        self._bar.update(self._task, completed=driver.tally.turns, speed=speed)
        self._bar.refresh()
