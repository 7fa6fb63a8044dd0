"""Speculator "simulated": the costs of a drafter in simulations; nothing is drafted.

Whether its drafts are accepted is decided by the pool's forced acceptance (`[pool.speculation]`): chances per
position, a mean length, or a published curve. A drafter runs as `passes` passes of `layers` layers like the
target's, and the target's head, in each of which it drafts max_drafts / passes tokens: MTP and EAGLE draft
one per pass, block drafters (DFlash, DSpark) all in one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from bien.core.api import (
    Architecture,
    Context,
    DeploymentError,
    KVGroup,
    Provider,
    SpeculatorCaps,
    hookimpl,
)


class SimulatedDrafterConfig(msgspec.Struct, forbid_unknown_fields=True):
    max_drafts: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    passes: Annotated[int, msgspec.Meta(ge=1)] | None = None  # None: one per draft
    layers: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0  # of the target's cost each
    pass_ms: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0  # where steps have constant costs

    def __post_init__(self) -> None:
        if self.passes is not None and self.passes > self.max_drafts:
            raise ValueError(f"passes = {self.passes}, but only {self.max_drafts} drafts are made in them")

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return ()


class SimulatedDrafter:
    """What a simulated executor asks for. A real one cannot load it."""

    simulated = True

    def __init__(self, config: SimulatedDrafterConfig) -> None:
        self.caps = SpeculatorCaps(place="device", max_drafts=config.max_drafts)
        self.passes = config.passes or config.max_drafts
        self.layers = config.layers
        self.pass_seconds = config.pass_ms / 1000

    def groups(self, architecture: Any, block_tokens: int) -> tuple[KVGroup, ...]:
        return ()

    def load(self, target: Any, groups: tuple[int, ...], parts: Any) -> None:
        raise DeploymentError(
            "speculator 'simulated' is for simulations only; valid here: one that drafts, or none",
            field="speculator",
        )

    def absorb(self, rows: Any, taps: Any, confirmed: Any) -> None:
        pass

    def propose(self, rows: Any, last: Any, limit: int, drawer: Any) -> Any:
        raise DeploymentError("speculator 'simulated' drafts in simulations only", field="speculator")

    def close(self) -> None:
        pass


def _make(config: SimulatedDrafterConfig, ctx: Context) -> SimulatedDrafter:
    if not ctx.speculation.acceptance:
        raise DeploymentError(
            "speculator 'simulated' needs the pool's forced acceptance; valid: speculation.acceptance, "
            "speculation.acceptance_length or speculation.golden",
            field="speculation",
        )
    return SimulatedDrafter(config)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            "simulated",
            _make,
            SimulatedDrafterConfig,
            summary="costs of a drafter whose acceptance is forced, in simulations",
        )
    ]
