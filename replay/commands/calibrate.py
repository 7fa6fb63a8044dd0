"""`bien calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("calibrate")(calibrate)


def calibrate(
    deployment: Annotated[
        str, typer.Argument(help="A deployment.toml, or the name of a built-in deployment, with one pool.")
    ] = "laptop",
    url: Annotated[
        str | None,
        typer.Option(
            help="A vLLM or SGLang server that serves the deployment's model, and nobody else uses, instead "
            "of an engine that is started here."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="What it runs on: a known machine, or the path of a .toml file. Left out: that of the "
            "deployment's executor, else cpu-2core where the engine is started here."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Prompt tokens of all probes together, about.")] = 75_000,
    context: Annotated[int, typer.Option(help="Tokens of the longest probe.")] = 4096,
    sessions: Annotated[int, typer.Option(help="With --url: sequences at a time, at most.")] = 16,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="With --url: tokens of a step at most, as the server was started (max_num_batched_tokens of "
            "vLLM, chunked_prefill_size of SGLang). Left out: what it says, or the least default."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where the calibration goes: `factors` of the executor `simulated`.")
    ] = Path("calibration.json"),
    plot: Annotated[Path | None, typer.Option(help="Draw predicted over measured there, as a PNG.")] = None,
) -> None:
    """Fit the simulator's costs to a running engine: probes of many sizes run on it, its steps are recorded,
    or with --url inferred from its streams and metrics, some are fitted to, and the error on all others is
    printed."""
    from bien.core.clock import WallClock
    from bien.core.errors import UserError
    from bien.replay.calibrate.display import print_learnt
    from bien.replay.calibrate.plot import write_plot
    from bien.replay.calibrate.remote_run import calibrate_remote
    from bien.replay.calibrate.run import calibrate_own, write_calibration
    from bien.replay.commands.deployment import composed
    from bien.replay.display import Display
    from bien.replay.files import check_folder, same_file
    from bien.replay.say import say
    from bien.replay.signals import end_as_ctrl_c

    end_as_ctrl_c()
    for name, value, least in (("tokens", tokens, 1000), ("context", context, 256)):
        if value < least:
            raise UserError(f"--{name} is {value}; valid: {least} or more")
    for path, what in ((out, "calibration"), (plot, "plot")):
        if path is not None:
            check_folder(path, what)
    if plot is not None and same_file(out, plot):
        raise UserError(f"--out and --plot are both {out}; valid: two files")
    if url is None and chunk is not None:
        raise UserError("--chunk says how a server was started; leave it out without --url")
    composition = composed(deployment)
    notes: list[str] = []
    with Display(WallClock()) as display:
        if url is None:
            learnt = calibrate_own(
                composition, machine or "cpu-2core", display.step, tokens=tokens, context=context
            )
        else:
            learnt, notes = calibrate_remote(
                composition,
                url,
                machine,
                display.step,
                tokens=tokens,
                context=context,
                sessions=sessions,
                chunk=chunk,
            )
    for note in notes:
        say(note, "yellow")
    print_learnt(learnt)
    write_calibration(out, learnt)
    say(f"written to {out}")
    if plot is not None:
        write_plot(plot, learnt)
        say(f"drawn to {plot}")
