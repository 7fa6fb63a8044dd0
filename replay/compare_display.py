"""The table of `bien compare`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bien.replay.compare import Comparison
from bien.replay.report.words import clean


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Figures with their ratio b / a; first what the reader must know to trust them."""
    console = console or Console()

    def say(text: str, style: str = "") -> None:
        console.print(Text(clean(text), style), soft_wrap=True)

    for d in comparison.unlike:
        say(f"FORCED, cards are unlike: {d.field}: {_text(d.a)} | {_text(d.b)}", "bold red")
    for name, reasons in comparison.invalid.items():
        for reason in reasons:
            say(f"{name} is not valid: {reason}", "yellow")
    say(f"a: {comparison.a}, {comparison.kinds[0]}, bien {comparison.versions[0]}")
    say(f"b: {comparison.b}, {comparison.kinds[1]}, bien {comparison.versions[1]}")
    for d in comparison.deployment:
        say(f"deployment {d.field}: {_text(d.a)} | {_text(d.b)}")
    table = Table(
        title=None if comparison.alike else "forced: the cards are unlike, ratios mean little",
        title_style="bold red",
        box=None,
        padding=(0, 2),
    )
    table.add_column("", style="bold", no_wrap=True)
    for name in ("a", "b", "b / a"):
        table.add_column(name, justify="right", no_wrap=True)
    for figure in comparison.figures:
        if figure.a is not None or figure.b is not None:
            ratio = "-" if figure.ratio is None else f"{figure.ratio:.3f}"
            table.add_row(figure.name, _number(figure.a), _number(figure.b), ratio)
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def _text(value: object) -> str:
    return "-" if value is None else str(value)
