"""The tables of `bien validate cliffs`, and its progress."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bien.replay.report.words import clean
from bien.replay.validate.cliff_arms import Arm
from bien.replay.validate.cliff_published import Published
from bien.replay.validate.cliffs import Cliffs, Curve, Simulated

WIDTH = 118  # of the tables


def print_cliffs(found: Cliffs, console: Console | None = None) -> None:
    """What costs are, every point beside the published one, the knees, and all that was assumed."""
    console = console or Console()
    if not console.is_terminal and console.width < WIDTH:  # a pipe has none of its own
        console = Console(width=WIDTH, file=console.file)

    def say(text: str, style: str = "") -> None:
        console.print(Text(clean(text), style), soft_wrap=True)

    which = "all sessions" if found.sessions is None else f"the first {found.sessions} sessions"
    say(f"knee: {found.rule}; {found.trace}, {which}, gaps of at most {found.gap_cap:g} s")
    if found.share < 1:
        say(
            f"caches have {found.share:.1%} of their room: so much smaller are prompts of the 406 Weka "
            "sessions than measured ones on average, and as many sessions are to fit",
            "yellow",
        )
    for curve in found.curves:
        say("")
        say(curve.title, "bold")
        say(f"  published: {curve.source}")
        if curve.calibrated_on is None:
            say("  uncalibrated")
        else:
            say(
                f"  steps take {curve.pace:.2f} times the roofline, by the published ITL at concurrency "
                f"{curve.calibrated_on}, which is no prediction then"
            )
        for room in curve.rooms:
            how = "simulated" if room.simulated else "computed only"
            say(f"  KV of stage {room.stage} ({how}): {room.tokens:,} tokens; {room.text}")
        console.print(_points(curve))
        say(verdict(curve), "" if curve.within else "yellow")
        fall = _or_none(curve.drop_published), _or_none(curve.drop_simulated)
        say(f"  output falls, published {fall[0]}, simulated {fall[1]}")
        for text in curve.assumptions:
            say(f"  assumed: {text}")
    if found.interrupted:
        say("interrupted: the curves above are whole, others are missing", "yellow")


def verdict(curve: Curve) -> str:
    """One line."""
    if curve.off is None:
        last = curve.published[-1].concurrency
        return f"  knee published at {curve.knee_published}, none simulated up to {last}"
    if curve.off == 0:
        return f"  knee published and simulated at {curve.knee_published}"
    steps = f"{abs(curve.off)} step{'s' if abs(curve.off) > 1 else ''} {'late' if curve.off > 0 else 'early'}"
    return f"  knee published at {curve.knee_published}, simulated at {curve.knee_simulated}: {steps}"


class CliffProgress:
    """A bar over points; `notify` says how far one is. Use as a context manager."""

    def __init__(self, arms: tuple[Arm, ...], console: Console | None = None) -> None:
        total = sum(len(arm.grid) + (arm.calibrate is not None) for arm in arms)
        self._bar = Progress(
            TextColumn("points"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=console or Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("points", total=total, now="")
        self._seen: dict[tuple[str, int], int] = {}
        self._again = 0

    def __enter__(self) -> CliffProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def notify(self, arm: str, concurrency: int, turns: int) -> None:
        before = self._seen.get((arm, concurrency))
        self._seen[arm, concurrency] = turns
        if before is not None and turns < before:  # the same point once more, at another pace
            self._again += 1
        done = len(self._seen) + self._again - 1
        self._bar.update(self._task, completed=done, now=f"{arm} at {concurrency}: {turns:,} turns")
        self._bar.refresh()


def _points(curve: Curve) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("trees", justify="right", style="bold")
    names = (
        "TTFT p50",
        "simulated",
        "p90",
        "simulated",
        "out tok/s/GPU",
        "simulated",
        "ITL ms",
        "simulated",
        "hit",
        "simulated",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    by = {p.concurrency: p for p in curve.simulated}
    for p in curve.published:
        table.add_row(*_row(curve, p, by[p.concurrency]))
    return table


def _row(curve: Curve, p: Published, s: Simulated) -> list[str]:
    per = curve.accelerators
    marks = ("P" if p.concurrency == curve.knee_published else "") + (
        "S" if p.concurrency == curve.knee_simulated else ""
    )
    return [
        f"{p.concurrency}{' ' + marks if marks else ''}",
        ("<= " if p.at_most else "") + _seconds(p.ttft),
        _seconds(s.ttft),
        _seconds(p.ttft_p90),
        _seconds(s.ttft_p90),
        _number(None if p.output is None else p.output / per),
        _number(None if s.output is None else s.output / per),
        _number(p.itl_ms, 1),
        _number(s.itl_ms, 1),
        _share(p.hit),
        _share(s.hit),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f} s"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _or_none(value: int | None) -> str:
    return "nowhere" if value is None else f"from {value} on"
