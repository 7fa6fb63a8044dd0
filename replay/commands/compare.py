"""`bien compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("compare")(compare)


def compare(
    a: Annotated[Path, typer.Argument(help="A result.json.")],
    b: Annotated[Path, typer.Argument(help="Another one; ratios are b / a.")],
    json: Annotated[Path | None, typer.Option(help="Also write the comparison there.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare results with unlike cards.")] = False,
) -> None:
    """Put two results side by side. Refused if they did not measure the same load."""
    from bien.replay.compare import compare as put
    from bien.replay.compare_display import print_comparison
    from bien.replay.files import check_folder, pretty, spare, write_whole
    from bien.replay.result import read_result

    if json is not None:
        spare(json, (a, b), "comparison")
        check_folder(json, "comparison")
    comparison = put(read_result(a), read_result(b), (a, b), force=force)
    if json is not None:
        write_whole(json, pretty(comparison), "comparison")
    print_comparison(comparison)
