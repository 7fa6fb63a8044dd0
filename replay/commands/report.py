"""`bien report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("report")(report)


def report(
    result: Annotated[Path, typer.Argument(help="A result.json.")],
    records: Annotated[
        Path | None,
        typer.Option(help="The run's turns. Else the .turns.jsonl.zst beside the result, if there is one."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
) -> None:
    """Draw a run as one HTML file: timelines, latencies, the cache account, card and deployment."""
    from bien.replay.report.page import draw

    draw(result, out, records)
