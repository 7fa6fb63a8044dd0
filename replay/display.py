"""`Display`: what a replay shows while it starts and runs: a live panel, else plain lines."""

from __future__ import annotations

from types import TracebackType

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bien.core.clock import Clock
from bien.replay.driver import Driver
from bien.replay.processes import WARNING
from bien.replay.say import as_is, say

REFRESH = 0.5  # seconds
PLAIN = 10.0


class Totals(msgspec.Struct, frozen=True):
    """What will be replayed, as far as it is known; 0: unknown."""

    sessions: int = 0
    turns: int = 0


class Display:
    """Use as a context manager; `step` while starting, then `follow` beside the driver."""

    def __init__(self, clock: Clock, console: Console | None = None) -> None:
        self._clock = clock
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._steps: dict[str, tuple[str, int, int]] = {}
        self._following = False

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None  # who goes on to say something gets plain lines

    def step(self, who: str, what: str, done: int = 0, total: int = 0) -> None:
        """`who` does `what` now; what WARNING says stays."""
        if who == WARNING:
            self.note(f"{who}: {what}")
            return
        before = self._steps.get(who)
        self._steps[who] = (what, done, total)
        if self._live and not self._following:
            self._live.update(self._starting(), refresh=True)
        elif before is None or before[0] != what:
            self.note(f"{who}: {what}")

    def note(self, text: str) -> None:
        """A line that stays."""
        say(text, console=self._live.console if self._live else self._console)

    async def follow(self, driver: Driver, totals: Totals) -> None:
        """Show the run until cancelled."""
        self._following = True
        every = REFRESH if self._live else PLAIN
        while True:
            await self._clock.sleep(every)
            if self._live:
                self._live.update(self._running(driver, totals), refresh=True)
            else:
                self.note(_line(driver, totals))

    def _starting(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for who, (what, done, total) in self._steps.items():
            bar = ProgressBar(total=total, completed=done, width=30) if total else Text("")
            share = Text(f"{done / total:.0%}" if total else "")
            table.add_row(as_is(who, "bold"), as_is(what), bar, share)
        return table

    def _running(self, driver: Driver, totals: Totals) -> RenderableType:
        bar = ProgressBar(total=totals.turns or None, completed=driver.tally.turns, width=60)
        grid = Table.grid()
        grid.add_row(bar)
        grid.add_row(Text(_line(driver, totals)))
        return grid


def _line(driver: Driver, totals: Totals) -> str:
    tally = driver.tally
    seconds = max(1e-9, driver.clock.time() - driver.started)
    sessions = tally.sessions_completed + tally.sessions_failed
    flying = [r for r in driver.records[-4096:] if r.ended < 0]
    output = tally.output_tokens + sum(r.got for r in flying)
    parts = [
        f"sessions {_of(sessions, totals.sessions)}",
        f"turns {_of(tally.turns, totals.turns)}",
        f"{len(flying)} in flight",
        f"{output / seconds:.1f} output tokens/s",
    ]
    if tally.prompt_tokens:
        parts.append(f"cache hit {tally.cached_tokens / tally.prompt_tokens:.1%}")
    if tally.errors:
        parts.append(f"{tally.errors} errors")
    left = totals.turns - tally.turns
    if totals.turns and tally.turns and left > 0:
        parts.append(f"ETA {_duration(seconds / tally.turns * left)}")
    return " · ".join(parts)


def _of(done: int, total: int) -> str:
    return f"{done}/{total}" if total else str(done)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
