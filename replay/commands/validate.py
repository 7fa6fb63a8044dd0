"""`bien validate`: predictions against measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the `validate` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Put predictions beside measurements.")
    group.command("published")(published)
    group.command("cliffs")(cliffs)
    group.command("engine")(engine)
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


def engine(
    trace: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces: files, folders, archives. None: the sample that ships with bien."),
    ] = None,
    deployment: Annotated[
        list[str] | None,
        typer.Option(help="A deployment.toml or a built-in name; repeat it to compare several."),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="Of each deployment in turn: a file of `bien calibrate`. None: calibrate first."),
    ] = None,
    machine: Annotated[str, typer.Option(help="What it runs on, where it is calibrated.")] = "cpu-2core",
    concurrency: Annotated[str, typer.Option(help="Session trees at a time, a ladder.")] = "1,2,3,5",
    runs: Annotated[int, typer.Option(help="Live runs of the first deployment at the highest load.")] = 5,
    token_scale: Annotated[str, typer.Option(help="Shrink all lengths by F = 1/2^k.")] = "1",
    time_scale: Annotated[float, typer.Option(help="Multiply the gaps between turns.")] = 0.1,
    gap_cap: Annotated[float | None, typer.Option(help="Longest gap in seconds, after scaling.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Replay so many sessions at most.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("validation"),
) -> None:
    """Calibrate an engine on this machine, predict whole replays on it, run them, and print what the
    predictions were off by beside what live runs differ by. Also the picture: interactivity against
    throughput, measured and predicted."""
    from bien.replay.commands.deployment import composed
    from bien.replay.files import pretty, write_whole
    from bien.replay.options import ReplayOptions, fraction
    from bien.replay.say import say
    from bien.replay.signals import end_as_ctrl_c
    from bien.replay.validate.engine import validate_engine
    from bien.replay.validate.engine_display import print_validation
    from bien.replay.validate.engine_plot import write_plot
    from bien.replay.validate.engine_subjects import find_subjects, parse_loads

    end_as_ctrl_c()
    loads = parse_loads(concurrency, runs)
    options = ReplayOptions(
        token_scale=fraction(token_scale, "--token-scale"),
        time_scale=time_scale,
        gap_cap=gap_cap,
        sessions=sessions,
    ).check()
    chosen = deployment or ["one-int8", "one-fp32"]
    subjects = find_subjects(
        [(name, composed(name)) for name in chosen], calibration or [], machine, out, say
    )
    found = validate_engine(subjects, loads, runs, tuple(trace or ()), options, out, say)
    print_validation(found)
    write_whole(out / "validation.json", pretty(found), "validation")
    write_plot(out / "frontier.png", found)
    say(f"written to {out}: validation.json, frontier.png and every result")
    if not all(j.met for j in found.judged) or found.cached_exact is False:
        raise typer.Exit(1)


def cliffs(
    trace: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Recorded sessions: files, folders, archives. None: the sample that ships with bien."
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="One published curve: glm-5.2-h200, kimi-k3-b300, kimi-k3-b300-host; repeatable."),
    ] = None,
    sessions: Annotated[int | None, typer.Option(help="Simulate so many sessions at most.")] = None,
    same_sessions: Annotated[
        bool,
        typer.Option(
            "--same-sessions/--same-tokens",
            help="Caches hold as many sessions as the measured servers' did (room times the mean prompt "
            "of the 406 Weka sessions over that of the measured ones: 55 %), or as many tokens.",
        ),
    ] = True,
    jobs: Annotated[int, typer.Option(help="Simulate so many points at a time, each in a process.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every point, knee and assumption there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT and cache hits there, as a PNG.")] = None,
) -> None:
    """Simulate servers whose published TTFT falls off a cliff at some concurrency, and compare where."""
    from bien.replay.files import check_folder, pretty, spare, write_whole
    from bien.replay.run import INTERRUPTED
    from bien.replay.say import say
    from bien.replay.signals import end_as_ctrl_c
    from bien.replay.validate.cliff_display import CliffProgress, print_cliffs
    from bien.replay.validate.cliff_plot import write_plot
    from bien.replay.validate.cliff_published import SESSIONS_SHARE
    from bien.replay.validate.cliffs import arms_named, run_cliffs

    end_as_ctrl_c()
    traces, arms = tuple(trace or ()), arms_named(arm or ())
    for path, what in ((json, "validation"), (plot, "plot")):
        if path is not None:
            spare(path, traces, what)
            check_folder(path, what)
    with CliffProgress(arms) as progress:
        share = SESSIONS_SHARE if same_sessions else 1.0
        found = run_cliffs(traces, arms, sessions, jobs, progress.notify, share)
    try:
        print_cliffs(found)
    finally:
        if json is not None:
            write_whole(json, pretty(found), "validation")
            say(f"written to {json}")
    if plot is not None:
        write_plot(plot, found)
        say(f"drawn to {plot}")
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
