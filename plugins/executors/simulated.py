"""Executor `simulated`: steps that cost virtual time only, by constants or by what a machine can do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from bien.core.api import (
    TERMS,
    Context,
    ExecutorPlan,
    Formats,
    Layout,
    Provider,
    StepModel,
    UserError,
    hookimpl,
    load_machine,
    machine_executor,
    nearest,
    simulated_executor,
)

Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CONSTANTS = {"step_ms": 8.0, "token_ms": 0.05, "row_ms": 0.0}


class SimulatedConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Without a machine: milliseconds of a step = step_ms + token_ms x computed tokens + row_ms x sequences
    in the step (8, 0.05 and 0 unless they are given).

    With one, a known name or the path of a .toml file: a roofline of the model's own bytes and operations, on
    tensor x data x pipeline accelerators, experts spread over `expert` of a stage and cut `expert_tensor`
    ways (0: what follows), in the formats of weights, routed experts, KV and head. `factors`: a file of a
    calibration.
    """

    step_ms: Milliseconds | UnsetType = UNSET
    token_ms: Milliseconds | UnsetType = UNSET
    row_ms: Milliseconds | UnsetType = UNSET
    machine: str | UnsetType = UNSET
    tensor: Count | UnsetType = UNSET
    data: Count | UnsetType = UNSET
    pipeline: Count | UnsetType = UNSET
    expert: Count | UnsetType = UNSET
    expert_tensor: Annotated[int, msgspec.Meta(ge=0)] | UnsetType = UNSET
    weights: str | UnsetType = UNSET
    routed: str | UnsetType = UNSET
    kv: str | UnsetType = UNSET
    head: str | UnsetType = UNSET
    factors: str | UnsetType = UNSET
    unlimited: bool | UnsetType = UNSET  # whether KV that does not fit is taken all the same

    def __post_init__(self) -> None:
        given = {
            name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET
        }
        constant = [name for name in given if name in CONSTANTS]
        if "machine" not in given:
            others = [name for name in given if name not in CONSTANTS]
            if others:
                raise ValueError(f"{others[0]} is given without a machine, of whose steps it is a part")
            return
        if constant:
            raise ValueError(
                f"machine and {', '.join(constant)} are both given; valid: a machine, or constant costs"
            )
        try:
            load_machine(str(self.machine))
            self.formats.check()
            self.fitted()
        except UserError as error:
            raise ValueError(str(error)) from None

    @property
    def layout(self) -> Layout:
        return Layout(**_given(self, Layout.__struct_fields__))

    @property
    def formats(self) -> Formats:
        return Formats(**_given(self, Formats.__struct_fields__))

    @property
    def accelerators(self) -> int | None:
        """That one engine takes; None without a machine."""
        return None if self.machine is UNSET else self.layout.devices

    @property
    def provenance(self) -> str:
        """Where the costs come from, in words."""
        if self.machine is UNSET:
            return "constant costs, uncalibrated"
        return f"roofline, calibrated by {self.factors}" if self.factors else "roofline, uncalibrated"

    def fitted(self) -> dict[str, float]:
        """The factors of a calibration. UserError names the file."""
        if self.factors is UNSET:
            return {}
        path = Path(str(self.factors))
        try:
            raw = msgspec.json.decode(path.read_bytes())
            found = msgspec.convert(raw["factors"], dict[str, Annotated[float, msgspec.Meta(ge=0)]])
        except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
            what = "'factors' is missing" if isinstance(error, KeyError | TypeError) else error
            raise UserError(f"calibration {path}: {what}", field="factors") from None
        for term in found:
            if term not in TERMS:
                raise UserError(
                    f"calibration {path}: no term {term!r}; {nearest(term, TERMS)}", field="factors"
                )
        return found


def _given(config: SimulatedConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(config, name)) is not UNSET}


def make(config: SimulatedConfig, ctx: Context) -> Any:
    if config.machine is not UNSET:
        if ctx.architecture is None:
            raise UserError("executor 'simulated' needs the architecture of the model in its context")
        machine = load_machine(str(config.machine))
        model = StepModel(ctx.architecture, machine, config.layout, config.formats, config.fitted())
        return machine_executor(ctx, model, limited=config.unlimited is not True)
    step, token, row = (
        value if (value := getattr(config, name)) is not UNSET else default
        for name, default in CONSTANTS.items()
    )

    def cost(plan: ExecutorPlan) -> float:
        return (step + token * plan.tokens + row * plan.rows) / 1000.0

    return simulated_executor(ctx, cost)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "executor",
            "simulated",
            make,
            SimulatedConfig,
            summary="virtual steps, of constant costs or those of a machine",
        )
    ]
