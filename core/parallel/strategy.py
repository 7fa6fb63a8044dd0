"""The parallel contract: how parameters are cut and where ranks talk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

Point = Literal["embed", "attention_out", "mlp_out", "logits"]


class Mesh(msgspec.Struct, frozen=True):
    """Ranks of one engine: named axes and sizes; `dp_ranks` engines share a worker."""

    axes: tuple[tuple[str, int], ...] = (("tensor", 1),)
    dp_ranks: int = 1

    @property
    def world(self) -> int:
        size = 1
        for _, n in self.axes:
            size *= n
        return size


class ParallelStrategy(Protocol):
    """One instance per rank."""

    rank: int

    def mesh(self, world: int) -> Mesh:
        """The mesh for `world` ranks; UserError naming legal sizes when it has none."""
        ...

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of parameter `name` that this rank loads (the whole of it: full slices)."""
        ...

    def kv_shard(self, heads: int) -> range:
        """The KV heads that this rank holds."""
        ...

    def collect(self, x: Tensor, point: Point) -> Tensor:
        """The collective at a named point of the model."""
        ...

    def agree(self, header: int) -> int:
        """Per step: the largest header over ranks (0 = idle; idle ranks run a dummy batch)."""
        ...

    def close(self) -> None: ...
