"""`subject`: the cost model, uncalibrated, of the engine that a deployment's only pool starts."""

from __future__ import annotations

from pathlib import Path

from bien.core.architectures.registry import read_architecture
from bien.core.compose import Composition
from bien.core.costs.formats import Formats
from bien.core.costs.layout import Layout
from bien.core.costs.machine import WIDER, load_machine
from bien.core.costs.step import StepModel
from bien.core.errors import UserError

_FORMATS = {"float64": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}


def check_subject(composition: Composition, machine: str) -> None:
    """UserError for a machine that is unknown, for a deployment of several pools (each has an engine of its
    own to calibrate), and for one whose engine is simulated itself."""
    load_machine(machine)
    if len(composition.pools) != 1:
        names = ", ".join(repr(p.spec.name) for p in composition.pools)
        raise UserError(f"the deployment has the pools {names}; valid: one pool, whose engine is calibrated")
    pool = composition.pools[0]
    if "simulated" in pool.parts["executor"].provider.name:
        raise UserError(
            f"pool {pool.spec.name!r} has the executor {pool.parts['executor'].provider.name!r}: there is no "
            "engine to observe; valid: one that computes, e.g. 'torch'"
        )


def subject(composition: Composition, machine: str, folder: str | Path) -> StepModel:
    """Of what `check_subject` let pass; `folder`: where the model lies, or a name whose config is known."""
    pool, model = composition.pools[0], composition.model
    architecture = read_architecture(str(folder), model.block_tokens, model.dtype, model.max_context)
    dtype, quantizer = _FORMATS[model.dtype], pool.parts["quantizer"]
    weights = quantizer.provider.name if quantizer.provider.name in WIDER else dtype
    head = weights if getattr(quantizer.config, "head", False) else dtype
    formats = Formats(weights=weights, kv=dtype, head=head)
    return StepModel(architecture, load_machine(machine), Layout(tensor=pool.spec.devices), formats)
