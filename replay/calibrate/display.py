"""What a calibration says of itself."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bien.core.costs.factors import CalibrationFile, Residuals
from bien.replay.calibrate.learn import Compared, Learnt
from bien.replay.say import as_is, say

WORST = 6


def print_learnt(learnt: Learnt, console: Console | None = None) -> None:
    console = console or Console()
    found = learnt.calibration
    say(f"calibrated: {found.engine}, {found.model} on {found.machine}", "bold", console)
    console.print(_errors(found))
    console.print(_worst(learnt.compared))
    factors = ", ".join(f"{name} {value:.3g}" for name, value in found.factors.items() if value)
    say(f"factors: {factors}; a request's way {1e3 * found.request_seconds:.1f} ms", console=console)
    for line in limits(found):
        say(line, "yellow", console)


def limits(found: CalibrationFile) -> list[str]:
    """Where a prediction would extrapolate."""
    return [
        f"beyond {r.low:,.0f} to {r.high:,.0f} {_OF[name]} a prediction extrapolates"
        for name, r in found.ranges.items()
    ]


_OF = {
    "tokens": "tokens of a step",
    "sequences": "sequences of a step",
    "positions": "positions that a token sees",
}


def _errors(found: CalibrationFile) -> Table:
    table = Table(box=None, padding=(0, 2))
    for name in ("error of", "places", "median", "p90", "of the sum"):
        table.add_column(name, justify="left" if name == "error of" else "right")
    for text, r in (("places fitted to", found.fitted), ("others", found.held_out)):
        if r is not None:
            table.add_row(text, *_row(r))
    return table


def _row(r: Residuals) -> tuple[str, ...]:
    return f"{r.places}", f"{r.median:.1%}", f"{r.p90:.1%}", f"{r.total:+.1%}"


def _worst(compared: list[Compared]) -> Table:
    table = Table(box=None, padding=(0, 2), title="largest residuals, by seconds", title_justify="left")
    for name in ("sequences", "tokens", "measured ms", "predicted ms", "off", "repeats", "fitted"):
        table.add_column(name, justify="right")
    order = sorted(compared, key=lambda c: -abs(c.predicted - c.measured) * c.repeats)
    for c in order[:WORST]:
        rows, tokens, *_ = [*c.place.split("/"), "", ""]
        table.add_row(
            *(as_is(text) for text in (rows, tokens)),
            f"{1e3 * c.measured:,.1f}",
            f"{1e3 * c.predicted:,.1f}",
            f"{c.predicted / c.measured - 1:+.1%}",
            str(c.repeats),
            "yes" if c.fitted else "no",
        )
    return table
