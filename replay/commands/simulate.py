"""`bien simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("simulate")(simulate)


def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces: files, folders, archives. None: the sample that ships with bien."),
    ] = None,
    deployment: Annotated[
        str, typer.Option(help="A deployment.toml, or the name of a built-in deployment.")
    ] = "simulated",
    calibration: Annotated[
        Path | None,
        typer.Option(help="Step costs of all pools: a file of `bien calibrate`, of an engine like theirs."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers of the deployment's only pool, instead of what it says.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Session trees at a time. Left out: 4, or as a trace with starting times says; with "
            "--ladder each cap x workers."
        ),
    ] = None,
    token_scale: Annotated[
        str, typer.Option(help="Shrink all lengths by F = 1/2^k, for example 1/32.")
    ] = "1",
    time_scale: Annotated[float, typer.Option(help="Multiply the gaps between turns.")] = 1.0,
    gap_cap: Annotated[float | None, typer.Option(help="Longest gap in seconds, after scaling.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Simulate so many sessions at most.")] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    slowdown: Annotated[
        bool,
        typer.Option(
            help="Simulate once more, one session tree at a time with an ideal cache: jobs.slowdown."
        ),
    ] = False,
    interval: Annotated[
        bool,
        typer.Option(help="Simulate twice more, as fast and as slow as the costs may be: intervals."),
    ] = True,
    ladder: Annotated[
        str | None,
        typer.Option(
            help="Simulate once per batch cap, like 1,2,4,8: ladder.json and ladder.png beside the results."
        ),
    ] = None,
    json: Annotated[Path, typer.Option(help="Where the result goes.")] = Path("result.json"),
    report: Annotated[
        Path | None, typer.Option(help="Draw the run there, as one HTML file (see bien report).")
    ] = None,
) -> None:
    """Replay sessions on a virtual clock: the same gateway, router, engine and driver, with an executor whose
    steps cost what the deployment says: constants, or what a machine takes for the model. No model is
    loaded."""
    from bien.core.plugins import PluginManager
    from bien.replay.commands.deployment import composed
    from bien.replay.interval import find_intervals
    from bien.replay.ladder import check_alone, climb, ladder_outputs, parse_caps
    from bien.replay.ladder_display import finish_ladder
    from bien.replay.ladder_runs import simulated_rung
    from bien.replay.options import ReplayOptions, fraction
    from bien.replay.outputs import check_outputs, check_spared, outputs_of
    from bien.replay.report.page import draw
    from bien.replay.result import write_result
    from bien.replay.run import INTERRUPTED
    from bien.replay.say import say
    from bien.replay.signals import end_as_ctrl_c
    from bien.replay.simulation import SimulationPlan, calibrated, with_workers
    from bien.replay.simulation import simulate as run
    from bien.replay.simulation_display import SimulationDisplay
    from bien.replay.summary import print_summary
    from bien.replay.traces import Survey, open_paths
    from bien.replay.turns_file import turn_lines, write_turns

    end_as_ctrl_c()
    options = ReplayOptions(
        concurrency=4 if concurrency is None else concurrency,
        token_scale=fraction(token_scale, "--token-scale"),
        time_scale=time_scale,
        gap_cap=gap_cap,
        sessions=sessions,
        seed=seed,
        open_loop=None if concurrency is None and ladder is None else False,
    ).check()
    chosen = composed(deployment).deployment
    if calibration is not None:
        chosen = calibrated(chosen, calibration)
    if workers is not None:
        chosen = with_workers(chosen, workers)
    manager, traces = PluginManager.load(), tuple(trace or ())
    survey = Survey(open_paths(traces, manager), options)
    survey.check()
    plan = SimulationPlan(traces, survey.settled(options), chosen, slowdown=slowdown)
    if ladder is not None:
        check_alone(None, report)
        base, rung = plan.deployment, simulated_rung(plan.traces, manager, slowdown)
        caps = parse_caps(ladder)
        check_spared(ladder_outputs(json, caps), plan.traces, manager, deployment)
        climbing = climb(caps, base, options, concurrency, json, manager, rung, say)
        raise typer.Exit(finish_ladder(climbing, json))
    check_outputs(outputs_of(json, report), plan.traces, manager, deployment)
    with SimulationDisplay(survey) as display:
        done = run(plan, manager, display.tick)
    result = done.result
    if interval and not done.interrupted:
        result.intervals = find_intervals(plan, result)
    try:
        write_result(json, result)
        write_turns(json, turn_lines(done.driver.records, done.driver.started))
    finally:
        print_summary(result)  # also when the disk is full by now
    say(f"written to {json}")
    if report is not None:
        draw(json, report)
    if done.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result.turns.count > result.turns.errors else 1)
