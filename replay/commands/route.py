"""`bien route explain` and `bien route chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the `route` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Routers, compared and put to the test.")
    group.command("explain")(explain_command)
    group.command("chaos")(chaos_command)
    app.add_typer(group, name="route")


def explain_command(
    trace: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces: files, folders, archives. None: the sample that ships with bien."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers, instead of what the deployment says.")] = None,
    capacity: Annotated[
        int | None,
        typer.Option(help="KV tokens of one worker. Left out: what the deployment says, or what then fits."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Session trees at a time.")] = 32,
    sessions: Annotated[int | None, typer.Option(help="The first so many sessions. Left out: all.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A router; may be repeated. Left out: all that are installed.")
    ] = None,
    ladder: Annotated[
        str | None, typer.Option(help="Further loads, as session trees at a time, like 8,16,64.")
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            help="Explain so many decisions: those that cost most, of each --policy or else of the "
            "deployment's router."
        ),
    ] = 0,
    deployment: Annotated[
        str,
        typer.Option(
            help="A deployment.toml, or the name of a built-in deployment: model, costs of its executor, "
            "parameters of its router."
        ),
    ] = "fleet",
    gap_cap: Annotated[
        float, typer.Option(help="Longest gap between turns in seconds; 1e9: as recorded.")
    ] = 60.0,
    time_scale: Annotated[float, typer.Option(help="Multiply the gaps between turns.")] = 1.0,
    skip_longer: Annotated[
        bool, typer.Option(help="Leave out sessions that are longer than --capacity.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(help="Rounds of searching for a placement in hindsight; 0: policies only.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Simulations side by side. Left out: one per core.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Where the result goes.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw cache hits against TTFT there, and with --ladder TTFT over load, as a PNG."),
    ] = None,
) -> None:
    """What each router makes of a trace, without a model: hit rate against one pooled cache of the same size,
    imbalance, TTFT, where cached tokens were lost, and what the best placement found in hindsight does.
    All of it is simulated: gateway, routers, index and engines are those that serve. Exit code 1 when turns
    of a router failed."""
    from bien.core.cores import available_cores
    from bien.core.plugins import PluginManager
    from bien.replay.commands.deployment import composed
    from bien.replay.files import pretty, write_whole
    from bien.replay.outputs import check_outputs
    from bien.replay.route.display import RouteProgress, parse_ladder, print_report
    from bien.replay.route.explain import RoutePlan, explain
    from bien.replay.route.plot import write_plot
    from bien.replay.say import say
    from bien.replay.signals import end_as_ctrl_c

    end_as_ctrl_c()
    manager, traces = PluginManager.load(), tuple(trace or ())
    plan = RoutePlan(
        traces,
        composed(deployment).deployment,
        workers=workers,
        capacity=capacity,
        concurrency=concurrency,
        sessions=sessions,
        time_scale=time_scale,
        gap_cap=gap_cap,
        seed=seed,
        policies=tuple(policy or ()),
        ladder=parse_ladder(ladder),
        requests=requests,
        rounds=rounds,
        skip_longer=skip_longer,
        jobs=available_cores() if jobs is None else jobs,
    ).check()
    outputs = [(path, what) for path, what in ((json, "result"), (plot, "plot")) if path is not None]
    check_outputs(outputs, traces, manager, deployment)
    with RouteProgress() as progress:
        report = explain(plan, manager, progress.note)
    try:
        if json is not None:
            write_whole(json, pretty(report), "result")
        if plot is not None:
            write_plot(plot, report)
    finally:
        print_report(report)  # also when the disk is full by now
    for path, _ in outputs:
        say(f"written to {path}")
    if report.failed:
        raise typer.Exit(1)


def chaos_command(
    url: Annotated[
        str,
        typer.Option(help="A router to put to the test, as http://HOST:PORT. Left out: bien's own stack."),
    ] = "",
    workers: Annotated[
        str,
        typer.Option(
            help="With --url: the URLs that the router has for its workers, with commas between. Stand-in "
            "engines are started there (127.0.0.1); they publish KV events 1000 ports above, replays 2000."
        ),
    ] = "",
    case: Annotated[
        list[int] | None, typer.Option(help="A case's number; may be repeated. Left out: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all prompts.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Where the result goes.")] = None,
) -> None:
    """Seventeen faults that users of routers have met, one after the other: engines restart, caches are
    emptied, messages get lost, names and sizes of blocks differ, tenants share. By default against bien's own
    gateways, before stand-in engines and before real workers that meet them in a Redis. Exit code 1 when a
    case fails."""
    import asyncio

    from bien.core.errors import UserError
    from bien.core.plugins import PluginManager
    from bien.replay.chaos.display import ChaosProgress, print_report
    from bien.replay.chaos.run import chosen, run
    from bien.replay.files import pretty, write_whole
    from bien.replay.outputs import check_outputs
    from bien.replay.say import say
    from bien.replay.signals import end_as_ctrl_c

    end_as_ctrl_c()
    if bool(url) != bool(workers):
        raise UserError("--url and --workers belong together; valid: both, or neither", field="workers")
    cases = chosen(case or ())
    if json is not None:
        check_outputs([(json, "result")], (), PluginManager.load())
    if url:
        say(f"engines at {workers}; the router at {url} may be started now", "dim")
    with ChaosProgress(len(cases)) as progress:
        places = [place.strip() for place in workers.split(",") if place.strip()]
        report = asyncio.run(run(cases, progress.note, url, places, seed))
    try:
        if json is not None:
            write_whole(json, pretty(report), "result")
    finally:
        print_report(report)
    if json is not None:
        say(f"written to {json}")
    if report.failed:
        raise typer.Exit(1)
