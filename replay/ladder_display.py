"""What a ladder leaves behind: its table, its plot, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bien.replay.ladder import Ladder, Rung, ladder_path, plot_path
from bien.replay.run import INTERRUPTED
from bien.replay.say import say

COLUMNS = ("cap", "trees", "tok/s\np50", "user\np90", "output\ntok/s", "comp.", "logical")
LATENCY = ("TTFT\np50 ms", "\np90 ms", "cache\nhit", "Pareto")


def finish_ladder(climbing: Iterator[Ladder], json: Path) -> int:
    """Climb to the end; whatever ends it, the finished rungs are shown and drawn. 0; 1 when a rung had
    no turn that ended well; 130 when interrupted."""
    ladder: Ladder | None = None
    try:
        for so_far in climbing:
            ladder = so_far
    finally:
        if ladder is not None and ladder.rungs:
            _leave(ladder, json)
        elif ladder is not None:
            plot_path(json).unlink(missing_ok=True)  # of an earlier ladder
            say(f"interrupted in the first rung: {ladder_path(json)} has none")
    if ladder is None or ladder.interrupted:
        return INTERRUPTED
    return 0 if all(rung.throughput.output for rung in ladder.rungs) else 1


def print_ladder(ladder: Ladder, console: Console | None = None) -> None:
    """One row a rung; throughput is per accelerator."""
    console = console or Console()
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in (*COLUMNS, *LATENCY):
        table.add_column(name, justify="right", no_wrap=True)
    for rung in ladder.rungs:
        table.add_row(*_row(rung), style="bold" if rung.efficient else None)
    console.print(table)
    for rung in ladder.rungs:
        for text in (*(f"not valid: {reason}" for reason in rung.reasons), *rung.notes):
            say(f"cap {rung.cap}: {text}", "yellow", console)
    if ladder.interrupted:
        say("interrupted: later rungs are missing", "yellow", console)


def _leave(ladder: Ladder, json: Path) -> None:
    from bien.replay.ladder_plot import write_plot

    print_ladder(ladder)
    write_plot(plot_path(json), ladder)
    say(f"written to {ladder_path(json)} and {plot_path(json)}, a result beside them per rung")


def _row(rung: Rung) -> list[str]:
    through = rung.throughput
    figures = (
        (rung.interactivity.p50, 1),
        (rung.interactivity.p90, 1),
        (through.output, 1),
        (through.computed, 0),
        (through.logical, 0),
        (rung.ttft_ms.p50, 0),
        (rung.ttft_ms.p90, 0),
    )
    cells = ["-" if value is None else f"{value:.{digits}f}" for value, digits in figures]
    hit = "-" if rung.cache_achieved is None else f"{rung.cache_achieved:.1%}"
    frontier = "*" if rung.efficient else "" if rung.valid else "invalid"
    return [str(rung.cap), str(rung.concurrency), *cells, hit, frontier]
