"""Calibrates on somebody else's server: from its URL, and a deployment that says what it serves."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import UNSET

from bien.core.architectures.registry import read_architecture
from bien.core.compose import Composition
from bien.core.costs.machine import load_machine
from bien.core.costs.step import StepModel
from bien.core.errors import UserError
from bien.replay.calibrate.learn import Learnt, Subject, learn
from bien.replay.calibrate.probes import Batch
from bien.replay.calibrate.remote import CONTEXT, SESSIONS, TOKENS, observe
from bien.replay.calibrate.subject import check_subject, subject
from bien.replay.processes import OnStep
from bien.replay.run import new_loop


def calibrate_remote(
    composition: Composition,
    url: str,
    machine: str | None,
    on_step: OnStep,
    *,
    tokens: int = TOKENS,
    context: int = CONTEXT,
    sessions: int = SESSIONS,
    chunk: int | None = None,
) -> tuple[Learnt, list[str]]:
    """Probe the server, fit; and notes to print. `machine`: see `served`. BienError: it cannot be probed, or
    says too little."""
    model, name = served(composition, machine)

    def on_batch(batch: Batch, done: int, total: int) -> None:
        on_step("probes", f"{batch.sessions} sequences of {batch.prompt} tokens", done, total)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        seen = runner.run(
            observe(
                url,
                on_batch,
                tokens=tokens,
                context=min(context, model.a.max_context),
                sessions=sessions,
                chunk=chunk,
                vocab_size=model.a.vocab_size,
            )
        )
    engine = f"{seen.engine or 'a server'} that serves {seen.model!r}"
    return learn(model, seen.observed, Subject(engine, composition.model.name, name)), seen.notes


def served(composition: Composition, machine: str | None) -> tuple[StepModel, str]:
    """The cost model, uncalibrated, of the server that the deployment stands for, and its machine: that of
    the executor `simulated`, or `machine`. UserError: neither says one, or they differ."""
    spec = composition.model
    if len(composition.pools) == 1:
        config: Any = composition.pools[0].parts["executor"].config
        stated = getattr(config, "machine", UNSET)
        if stated is not UNSET:
            if machine is not None and load_machine(machine) != load_machine(str(stated)):
                raise UserError(
                    f"--machine is {machine!r}, the deployment's executor has machine = {str(stated)!r}; "
                    "leave --machine out"
                )
            a = read_architecture(spec.name, spec.block_tokens, spec.dtype, spec.max_context)
            return StepModel(a, load_machine(str(stated)), config.layout, config.formats), str(stated)
        if "simulated" in composition.pools[0].parts["executor"].provider.name:
            raise UserError(
                "the deployment's executor 'simulated' has constant costs; valid with --url: machine = what "
                "the server runs on, and tensor, data, weights, kv as it was started",
                field="machine",
            )
    if machine is None:
        raise UserError(
            "with --url, --machine says what the server runs on; valid: a known machine or the path of a "
            ".toml file, or a deployment whose executor is 'simulated' with a machine"
        )
    check_subject(composition, machine)
    return subject(composition, machine, spec.name), machine
