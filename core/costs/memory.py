"""What one accelerator holds: weights, and in what is left its share of the KV groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bien.core.costs.formats import BYTES
from bien.core.costs.step import RESERVED, StepModel
from bien.core.errors import ResourceError
from bien.core.kv.groups import KVGroup

_ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Room:
    """For KV, on each accelerator of an engine."""

    bytes: int
    groups: tuple[KVGroup, ...]  # as one accelerator has them
    text: str  # how that came about

    def check(self, blocks: Sequence[int]) -> None:
        """ResourceError, with the numbers, where pools of so many blocks and a null block each do not fit."""
        need = sum(g.block_bytes * (n + 1) for g, n in zip(self.groups, blocks, strict=True))
        if need > self.bytes:
            parts = ", ".join(
                f"{n:,} blocks of {g.name!r} {g.block_bytes * (n + 1) / 1e9:,.1f} GB"
                for g, n in zip(self.groups, blocks, strict=True)
            )
            raise ResourceError(
                f"KV takes {need / 1e9:,.1f} GB of each accelerator ({parts}), {self.bytes / 1e9:,.1f} GB "
                f"are left: {self.text}; lower kv_tokens, slots or snapshots of the pool, or leave kv_tokens "
                "out: it is then what fits"
            )


def kv_groups(model: StepModel, groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """The groups with paged entries in the format that the model's formats say."""
    kv = model.formats.kv
    return tuple(
        msgspec.structs.replace(
            g, bytes_per_token=max(1, round(g.bytes_per_token * BYTES[kv] / _ITEM[g.dtype])), dtype=kv
        )
        if g.paged
        else g
        for g in groups
    )


def room(model: StepModel, groups: Sequence[KVGroup]) -> Room:
    """`groups`: as `kv_groups` returns them. ResourceError when the weights alone do not fit."""
    model.kv_tokens()  # the error
    machine, layout = model.machine, model.layout
    weights = model.weight_bytes()
    shares = (layout.kv_share(model.a, g.kind) / layout.data for g in groups)
    return Room(
        int(machine.memory_gb * 1e9 * (1 - RESERVED) - weights),
        tuple(_part(g, share) for g, share in zip(groups, shares, strict=True)),
        f"{layout.devices} x {machine.name} with {machine.memory_gb:,.0f} GB each, of which "
        f"{model.a.model!r} takes {weights / 1e9:,.1f} GB and {RESERVED:.0%} are kept free",
    )


def _part(group: KVGroup, share: float) -> KVGroup:
    return msgspec.structs.replace(
        group,
        bytes_per_token=max(1, round(group.bytes_per_token * share)) if group.paged else 0,
        constant_bytes=0 if group.paged else max(1, round(group.constant_bytes * share)),
    )
