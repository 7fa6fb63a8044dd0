"""Speculators "dflash" and "dspark": block drafters, which predict several tokens in one pass.

z-lab, "DFlash" (arXiv 2602.06036) and DFlash 2; DeepSeek, "DSpark" (arXiv 2607.05147). A checkpoint's folder
is read in the formats of z-lab, SpecForge, DeepSpec and speculators.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from bien.core.api import (
    Architecture,
    Context,
    DeploymentError,
    DeviceSpeculator,
    KVGroup,
    ModelError,
    Provider,
    hookimpl,
)
from bien.plugins.speculators.dflash.calibration import Temperature, check_count, read_temperatures
from bien.plugins.speculators.dflash.form import DFLASH, DSPARK, BlockForm, read_form
from bien.plugins.speculators.dflash.tensors import draft_groups


class DFlashConfig(msgspec.Struct, forbid_unknown_fields=True):
    """path: the folder of the checkpoint. max_drafts: of a round; None: as many as a block has. window:
    positions of the context that draft layers see, 0: as the checkpoint says (a long context then costs each
    round more). sampled: drafts are drawn, not the likeliest tokens. temperatures: of the confidences, one
    per draft of a block; empty: as `calibration.json` in the folder says."""

    path: str
    max_drafts: Annotated[int, msgspec.Meta(ge=1)] | None = None
    window: Annotated[int, msgspec.Meta(ge=0)] = 0
    sampled: bool = True
    temperatures: tuple[Temperature, ...] = ()

    kind: ClassVar[str] = DFLASH

    def form(self) -> BlockForm:
        """What the folder says. ModelError for one that is another drafter's."""
        found = read_form(Path(self.path).expanduser(), self.kind)
        if found.kind != self.kind:
            raise ModelError(
                f"{self.kind}: {found.folder} has heads that would be left out; use {found.kind!r}"
                if found.kind == DSPARK
                else f"{self.kind}: {found.folder} has no Markov and no confidence head; use {found.kind!r}"
            )
        return found

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return draft_groups(self.kind, self.form(), architecture, block_tokens, self.window)

    def drafts(self) -> int:
        """Of a round."""
        return self.form().drafts if self.max_drafts is None else self.max_drafts


class DSparkConfig(DFlashConfig):
    """As of `dflash`."""

    kind: ClassVar[str] = DSPARK


def make(config: DFlashConfig, ctx: Context) -> DeviceSpeculator:
    form = config.form()
    most = form.drafts if config.max_drafts is None else config.max_drafts
    if most > form.drafts:
        raise DeploymentError(
            f"{config.kind}: max_drafts = {most}, but a block of {form.folder} has {form.drafts}; "
            f"valid: 1 to {form.drafts}",
            field="max_drafts",
        )
    temperatures = config.temperatures
    if temperatures:
        check_count(temperatures, f"{config.kind}: parameters have", form.drafts)
    else:
        temperatures = read_temperatures(form.folder, config.kind, form.drafts)
    from bien.plugins.speculators.dflash.drafter import BlockDrafter

    return BlockDrafter(config.kind, form, most, config.window, temperatures, sampled=config.sampled)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            DFLASH,
            make,
            DFlashConfig,
            summary="DFlash and DFlash 2 checkpoints: a block of drafts in one pass (device)",
        ),
        Provider(
            "speculator",
            DSPARK,
            make,
            DSparkConfig,
            summary="DSpark checkpoints: DFlash's blocks with Markov and confidence heads (device)",
        ),
    ]
