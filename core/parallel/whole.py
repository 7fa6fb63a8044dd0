"""`Whole`: a parallel strategy of one rank, for models that every rank holds whole: drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bien.core.errors import UserError
from bien.core.parallel.strategy import Mesh, Point

if TYPE_CHECKING:
    from torch import Tensor

    from bien.core.parallel.communicator import Communicator


class Whole:
    """See `ParallelStrategy`. Nothing is cut, nothing is collected."""

    rank = 0

    def mesh(self, world: int) -> Mesh:
        if world != 1:
            raise UserError(f"a model that is held whole runs on 1 rank, not on {world}")
        return Mesh()

    def connect(self, communicator: Communicator) -> None:
        self.mesh(communicator.world)

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(0, n) for n in shape)

    def kv_shard(self, heads: int) -> range:
        return range(heads)

    def collect(self, x: Tensor, point: Point) -> Tensor:
        return x

    def agree(self, header: int) -> int:
        return header

    def close(self) -> None:
        pass
