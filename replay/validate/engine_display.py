"""What a validation on one's own engine says."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bien.replay.say import say
from bien.replay.validate.engine import RANKED, Validation


def print_validation(found: Validation, console: Console | None = None) -> None:
    console = console or Console()
    for note in found.notes:
        say(note, "yellow", console)
    console.print(_goals(found))
    console.print(_levels(found))
    words = {True: "equal at every level", False: "NOT equal", None: "evicted at every level"}
    cached = words[found.cached_exact]
    more = (
        f"; where tokens were evicted within {found.cached_points:.2f} points" if found.cached_points else ""
    )
    say(f"cached tokens, live and predicted: {cached}{more}", console=console)
    for path, name in RANKED.items():
        a, b = found.kendall[path], found.spearman[path]
        if a is not None and b is not None:
            order = f"Kendall {a:.2f}, Spearman {b:.2f}"
            say(f"order of {found.configurations} configurations by {name}: {order}", console=console)


def _goals(found: Validation) -> Table:
    base = max(found.levels, key=lambda level: len(level.live))
    title = f"{base.deployment} at concurrency {base.concurrency}, {len(base.live)} live runs"
    if base.utilisation is not None:
        title += f", workers busy {base.utilisation:.0%}"
    table = Table(box=None, padding=(0, 1), title=title, title_justify="left")
    for name in ("", "live", "predicted", "interval", "error", "allowed", "met"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for j in found.judged:
        interval = "" if j.low is None or j.high is None else f"{j.low:,.1f}-{j.high:,.1f}"
        table.add_row(
            j.name,
            f"{j.live:,.1f}",
            f"{j.predicted:,.1f}",
            interval,
            f"{j.error:+.1%}",
            f"{j.allowed:.1%}",
            "yes" if j.met else "NO",
        )
    return table


def _levels(found: Validation) -> Table:
    table = Table(
        box=None, padding=(0, 2), title="all configurations, live / predicted", title_justify="left"
    )
    table.add_column("deployment")
    for name in ("concurrency", *RANKED.values()):
        table.add_column(name, justify="right")
    for level in found.levels:
        cells = []
        for path in RANKED:
            live, predicted = level.measured(path), level.predicted[path]
            known = live is not None and predicted is not None
            cells.append(f"{live:,.1f} / {predicted:,.1f}" if known else "-")
        table.add_row(level.deployment, str(level.concurrency), *cells)
    return table
