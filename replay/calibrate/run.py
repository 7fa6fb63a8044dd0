"""Calibrates what a deployment starts: from its name to a `Learnt`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from bien.core.compose import Composition
from bien.core.models.fetch import resolve_model
from bien.replay.calibrate.learn import Compared, Learnt, Subject, learn
from bien.replay.calibrate.own import CONTEXT, TOKENS, observe
from bien.replay.calibrate.probes import Batch
from bien.replay.calibrate.subject import check_subject, subject
from bien.replay.files import pretty, write_whole
from bien.replay.processes import OnStep
from bien.replay.report.words import counted
from bien.replay.run import new_loop


def calibrate_own(
    composition: Composition, machine: str, on_step: OnStep, *, tokens: int = TOKENS, context: int = CONTEXT
) -> Learnt:
    """Start the deployment, probe it, stop it, fit. BienError: it cannot be started, or says too little."""

    def progress(what: str, done: int, total: int) -> None:
        on_step("model", what, done, total)

    check_subject(composition, machine)
    model = subject(composition, machine, resolve_model(composition.model.name, progress))

    def on_batch(batch: Batch, done: int, total: int) -> None:
        on_step("probes", f"{batch.sessions} sessions of {batch.prompt} tokens", done, total)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        observed = runner.run(
            observe(composition.deployment, on_step, on_batch, tokens=tokens, context=context)
        )
    pool = composition.pools[0].spec
    engine = f"bien, {counted(pool.count, 'worker')} with quantizer {pool.quantizer.use!r}"
    return learn(model, observed, Subject(engine, composition.model.name, machine))


def write_calibration(path: Path, learnt: Learnt) -> None:
    """The file that simulations read, with every place beside it for people."""
    places: list[Compared] = learnt.compared
    data = {**msgspec.to_builtins(learnt.calibration), "places": msgspec.to_builtins(places)}
    write_whole(path, pretty(data), "calibration")
