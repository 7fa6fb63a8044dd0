"""Executor `simulated`: steps that cost virtual time only, by constants or by what a machine can do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from bien.core.api import (
    CalibrationFile,
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
    read_calibration,
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
    ways (0: what follows), in the formats of weights, routed experts, KV and head. `factors`: a file of
    `bien calibrate`.

    Either: seconds of all steps times `pace`.
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
    pace: Annotated[float, msgspec.Meta(gt=0.0, le=1e3)] = 1.0
    unlimited: bool | UnsetType = UNSET  # whether KV that does not fit is taken all the same

    def __post_init__(self) -> None:
        given = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not UNSET and name != "pace"
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
            self.calibration()
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
        found = self.calibration()
        if found is None:
            return "roofline, uncalibrated"
        error = f" (its error elsewhere {found.held_out.median:.1%})" if found.held_out else ""
        return f"roofline, calibrated on {found.engine or self.factors}{error}{self._other(found)}"

    def calibration(self) -> CalibrationFile | None:
        """What `factors` names. UserError names the file, or the machine that it was made with."""
        if self.factors is UNSET:
            return None
        found = read_calibration(Path(str(self.factors)))
        if found.machine and load_machine(found.machine) != load_machine(str(self.machine)):
            raise UserError(
                f"calibration {self.factors}: its factors are of the machine {found.machine!r}; "
                f"valid: machine = that one, not {self.machine!r}",
                field="factors",
            )
        return found

    def _other(self, found: CalibrationFile) -> str:
        """In what the calibrated engine was another than this one; its model is not known here."""
        layout, formats = msgspec.structs.asdict(self.layout), msgspec.structs.asdict(self.formats)
        changed = [
            k for k, v in {**layout, **formats}.items() if {**found.layout, **found.formats}.get(k, v) != v
        ]
        return f", extrapolated to another {', '.join(changed)}" if changed else ""


def _given(config: SimulatedConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(config, name)) is not UNSET}


def make(config: SimulatedConfig, ctx: Context) -> Any:
    if config.machine is not UNSET:
        if ctx.architecture is None:
            raise UserError("executor 'simulated' needs the architecture of the model in its context")
        machine = load_machine(str(config.machine))
        found = config.calibration()
        model = StepModel(
            ctx.architecture,
            machine,
            config.layout,
            config.formats,
            found.factors if found else None,
            found.correction if found else None,
        )
        return machine_executor(ctx, model, limited=config.unlimited is not True, pace=config.pace)
    step, token, row = (
        value if (value := getattr(config, name)) is not UNSET else default
        for name, default in CONSTANTS.items()
    )

    drafter: Any = ctx.parts.get("speculator")
    drafting = drafter.passes * drafter.pass_seconds if getattr(drafter, "simulated", False) else 0.0

    def cost(plan: ExecutorPlan) -> float:
        drafts = drafting if drafting and plan.samples.any() else 0.0
        return config.pace * ((step + token * plan.tokens + row * plan.rows) / 1000.0 + drafts)

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
