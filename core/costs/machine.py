"""`Machine`: what one accelerator (or processor) can do, and how accelerators reach each other. No torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from bien.core.errors import UserError, nearest

FOLDER = Path(__file__).parent / "machines"
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between accelerators. `world`: how many are reached at this speed."""

    gb_per_s: Positive  # one direction, per accelerator
    latency_us: Annotated[float, msgspec.Meta(ge=0)]  # of one small message
    world: Annotated[int, msgspec.Meta(ge=1)] = 1


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the peak that real kernels reach: a prior, until a calibration has measured them."""

    compute: Share = 0.6
    memory: Share = 0.8
    link: Share = 0.8


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accelerator. Rates are dense peaks as its vendor states them."""

    name: str
    source: str  # where the numbers come from
    memory_gb: Positive
    memory_gb_per_s: Positive
    tflops: dict[str, Positive]  # by format of the operands: fp32, bf16, fp8, int8, fp4
    scale_up: Link  # inside a node or rack
    scale_out: Link  # beyond
    host_link_gb_per_s: Positive = 64.0  # to the host's memory (tiers), one direction
    kernel_us: Annotated[float, msgspec.Meta(ge=0)] = 3.0  # of one kernel that has nothing to do
    kernels_per_layer: Annotated[int, msgspec.Meta(ge=0)] = 8
    host_us: Annotated[float, msgspec.Meta(ge=0)] = 500.0  # of one step outside the device
    host_us_per_row: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    efficiency: Efficiency = Efficiency()

    def compute(self, kind: str) -> float:
        """Peak operations per second with operands of format `kind`; the next wider one where the machine has
        no such units. UserError for a format that nothing here computes."""
        if kind not in WIDER:
            raise UserError(f"format {kind!r} is unknown; {nearest(kind, WIDER)}", field="format")
        for usable in WIDER[kind]:
            if usable in self.tflops:
                return self.tflops[usable] * 1e12
        raise UserError(f"machine {self.name!r} states no rate for {kind!r}; it has {', '.join(self.tflops)}")


# Operands of a narrow format are computed in the first of these that the machine has.
WIDER = {
    "fp4": ("fp4", "fp8", "bf16", "fp32"),
    "int4": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp32"),
    "int8": ("int8", "bf16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp32": ("fp32", "bf16"),
}


def machines() -> list[str]:
    """The machines that are known by name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def machine_path(name: str | Path) -> str:
    """What `load_machine` finds again from any folder: a known machine's name, or its file's whole path."""
    path = Path(name)
    return str(path.resolve()) if path.suffix == ".toml" else str(name)


def load_machine(name: str | Path) -> Machine:
    """A known machine, or one from a TOML file. UserError names the file and what is wrong in it."""
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in machines():
            raise UserError(
                f"no machine {str(name)!r}; {nearest(str(name), machines())}, or the path of a .toml file",
                field="machine",
            )
        path = FOLDER / f"{name}.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(raw, Machine)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UserError(f"machine {path}: {error}", field="machine") from None
