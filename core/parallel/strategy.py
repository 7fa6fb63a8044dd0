"""The parallel contract: how parameters are cut and where ranks talk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from bien.core.parallel.communicator import Communicator

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
    """One instance per rank. Where there is more than one, `connect` is called once, after `mesh` and before
    all else; a simulated engine asks for the mesh only."""

    rank: int

    def mesh(self, world: int) -> Mesh:
        """The mesh for `world` ranks; UserError naming legal sizes when it has none. Starts nothing."""
        ...

    def connect(self, communicator: Communicator) -> None:
        """This instance is rank `communicator.rank` of its world. The caller closes the communicator."""
        ...

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of parameter `name` that this rank loads (the whole of it: full slices). A bias that
        is added before a sum over ranks is whole on one of them and empty on the others."""
        ...

    def kv_shard(self, heads: int) -> range:
        """The KV heads that this rank holds."""
        ...

    def collect(self, x: Tensor, point: Point) -> Tensor:
        """The collective at a named point of the model. `x` may be overwritten."""
        ...

    def agree(self, header: int) -> int:
        """Per step: the largest header over ranks (0 = idle; idle ranks run a dummy batch)."""
        ...

    def close(self) -> None: ...
