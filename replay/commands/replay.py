"""`bien replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DEPLOYMENT = "laptop"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("replay")(replay)


def replay(
    trace: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces: files, folders, archives. None: the sample that ships with bien."),
    ] = None,
    deployment: Annotated[
        str, typer.Option(help="A deployment.toml, or the name of a built-in deployment.")
    ] = DEFAULT_DEPLOYMENT,
    url: Annotated[
        str | None, typer.Option(help="Replay against this server instead of starting a deployment.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(help="KV index in this Redis: a URL, or `embedded` for a private server."),
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
    sessions: Annotated[int | None, typer.Option(help="Replay so many sessions at most.")] = None,
    seed: Annotated[int, typer.Option(help="Of the tokens that stand for the trace's content.")] = 0,
    ladder: Annotated[
        str | None,
        typer.Option(
            help="Replay once per batch cap, like 1,2,4,8: ladder.json and ladder.png beside the results."
        ),
    ] = None,
    json: Annotated[Path, typer.Option(help="Where the result goes.")] = Path("result.json"),
    report: Annotated[
        Path | None, typer.Option(help="Draw the run there, as one HTML file (see bien report).")
    ] = None,
) -> None:
    """Replay agents' sessions, closed loop, and measure: recorded turns are fed back, gaps run from end to
    start, sub-agents join their parents."""
    from bien.core.errors import UserError
    from bien.core.plugins import PluginManager
    from bien.replay.commands.deployment import composed
    from bien.replay.ladder import check_alone, climb, ladder_outputs, parse_caps
    from bien.replay.ladder_display import finish_ladder
    from bien.replay.ladder_runs import live_rung
    from bien.replay.live import Plan
    from bien.replay.options import ReplayOptions, fraction
    from bien.replay.outputs import check_spared
    from bien.replay.redis_option import with_redis
    from bien.replay.run import run_live
    from bien.replay.say import say

    options = ReplayOptions(
        concurrency=4 if concurrency is None else concurrency,
        token_scale=fraction(token_scale, "--token-scale"),
        time_scale=time_scale,
        gap_cap=gap_cap,
        sessions=sessions,
        seed=seed,
        open_loop=None if concurrency is None and ladder is None else False,
    ).check()
    if url is not None and redis is not None:
        raise UserError(
            "--redis chooses the index of a deployment that is started here; leave it out with --url"
        )
    if ladder is not None:
        check_alone(url, report)
        manager, paths = PluginManager.load(), tuple(trace or ())
        base = with_redis(composed(deployment).deployment, redis)
        run = live_rung(paths)
        caps = parse_caps(ladder)
        check_spared(ladder_outputs(json, caps), paths, manager, deployment)
        climbing = climb(caps, base, options, concurrency, json, manager, run, say)
        raise typer.Exit(finish_ladder(climbing, json))
    chosen = None if url else with_redis(composed(deployment).deployment, redis)
    source = None if url else deployment
    raise typer.Exit(run_live(Plan(tuple(trace or ()), options, json, chosen, url, report, source)))
