"""What a simulation's steps cost, and where that comes from: said first, before any figure."""

from __future__ import annotations

from typing import Any

import msgspec

from bien.core.compose import Composition, PoolComposition
from bien.core.costs.factors import UNCALIBRATED
from bien.core.costs.machine import load_machine
from bien.replay.targets.gateway import Way

UNKNOWN = "costs of a plugin, of unknown origin"


class PoolCosts(msgspec.Struct):
    """`provenance` says what the costs are and whether a calibration has met an engine."""

    pool: str
    provenance: str
    accelerators: int  # of one worker
    machine: str = ""
    source: str = ""  # of the machine's numbers
    layout: dict[str, int] = {}
    formats: dict[str, str] = {}
    factors: dict[str, float] = {}  # of the calibration, by term
    deviation: float | None = None  # of the logarithm of seconds of many steps; None: of constants, unknown

    @property
    def text(self) -> str:
        """One line."""
        if not self.machine:
            return self.provenance
        layout = ", ".join(f"{name} {n}" for name, n in self.layout.items() if n > 1)
        formats = ", ".join(f"{name} {kind}" for name, kind in self.formats.items() if kind)
        return f"{self.provenance}: {self.accelerators} x {self.machine} ({layout or 'one'}; {formats})"


def accelerators(pool: PoolComposition) -> int:
    """That one worker takes."""
    return getattr(pool.parts["executor"].config, "accelerators", None) or pool.spec.devices


def way_of(composition: Composition) -> Way:
    """Of a request to the engine and back, by the calibrations of the pools: the mean of them."""
    found = [getattr(p.parts["executor"].config, "calibration", lambda: None)() for p in composition.pools]
    known = [c for c in found if c is not None]
    if not known:
        return Way()
    return Way(
        sum(c.request_seconds for c in known) / len(known), sum(c.token_seconds for c in known) / len(known)
    )


def pool_costs(composition: Composition) -> list[PoolCosts]:
    """Of each pool, by what its executor's configuration says of itself."""
    return [_costs(pool) for pool in composition.pools]


def _costs(pool: PoolComposition) -> PoolCosts:
    config: Any = pool.parts["executor"].config
    found = PoolCosts(pool.spec.name, getattr(config, "provenance", UNKNOWN), accelerators(pool))
    if getattr(config, "accelerators", None):
        machine = load_machine(config.machine)
        found.machine, found.source = machine.name, machine.source
        found.layout = msgspec.structs.asdict(config.layout)
        found.formats = msgspec.structs.asdict(config.formats)
        calibration = config.calibration()
        found.factors = calibration.factors if calibration else {}
        found.deviation = calibration.deviation if calibration else UNCALIBRATED
    return found
