"""`bien validate`: predictions against measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the `validate` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Put predictions beside measurements.")
    group.command("published")(published)
    group.callback()(_group)  # one command stays a group
    app.add_typer(group, name="validate")


def published(
    points: Annotated[Path, typer.Option(help="A table of measured points: CSV, also as .xz.")],
    calibrate: Annotated[
        int, typer.Option(help="Calibrate on so many points of a group at most; 0: not at all.")
    ] = 8,
    json: Annotated[
        Path | None, typer.Option(help="Write groups, errors and every prediction there.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted over measured there, as a PNG.")] = None,
) -> None:
    """Predict TTFT and TPOT of published points: uncalibrated, and calibrated on a few points of each group
    (model, gpu, framework, precision, disaggregated or not). Errors are those of the other points."""
    from bien.replay.files import check_folder, pretty, spare, write_whole
    from bien.replay.say import say
    from bien.replay.validate.display import print_outcome
    from bien.replay.validate.plot import write_plot
    from bien.replay.validate.points import read_points
    from bien.replay.validate.published import validate

    for path, what in ((json, "validation"), (plot, "plot")):
        if path is not None:
            spare(path, (points,), what)
            check_folder(path, what)
    outcome = validate(read_points(points), calibrate)
    try:
        print_outcome(outcome)
    finally:
        if json is not None:
            write_whole(json, pretty(outcome), "validation")
            say(f"written to {json}")
    if plot is not None:
        write_plot(plot, outcome)
        say(f"drawn to {plot}")


def _group() -> None:
    """Put predictions beside measurements."""
