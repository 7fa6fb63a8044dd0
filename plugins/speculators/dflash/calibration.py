"""Calibration of confidences: one temperature per draft of a block, for its logit. No torch.

DeepSeek, "DSpark" (arXiv 2607.05147), sequential temperature scaling: fitted from left to right so that the
product of a block's confidences is right. Kept in `calibration.json` beside a checkpoint's weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from bien.core.api import ModelError

if TYPE_CHECKING:
    from torch import Tensor

FILE = "calibration.json"
Temperature = Annotated[float, msgspec.Meta(gt=0, le=1000)]
_EDGE = 1e-6  # confidences are kept so far from 0 and 1, whose logits are infinite


class Calibration(msgspec.Struct, frozen=True):
    """The file: an object with `temperatures`, and what else its maker wants to say."""

    temperatures: tuple[Temperature, ...]


def read_temperatures(folder: Path, kind: str, drafts: int) -> tuple[float, ...]:
    """Of the folder's file; empty without one. ModelError for one that is not right."""
    path = folder / FILE
    if not path.is_file():
        return ()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration).temperatures
    except (msgspec.DecodeError, OSError) as error:
        raise ModelError(f"{kind}: {path} is no calibration: {error}") from error
    check_count(found, f"{kind}: {path} has", drafts)
    return found


def check_count(temperatures: tuple[float, ...], where: str, drafts: int) -> None:
    """ModelError unless there is one for each draft."""
    if len(temperatures) != drafts:
        raise ModelError(f"{where} {len(temperatures)} temperatures; a block has {drafts} drafts")


def scaled(chance: Tensor, temperature: float) -> Tensor:
    """Chances in 0..1 whose logits are divided by the temperature."""
    return (chance.clamp(_EDGE, 1 - _EDGE).logit() / temperature).sigmoid()
