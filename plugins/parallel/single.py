"""Parallel strategy `single`: one rank holds everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bien.core.api import (
    Communicator,
    Context,
    Mesh,
    NoParameters,
    ParallelStrategy,
    Point,
    Provider,
    UserError,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor


class Single:
    """Nothing is cut, nothing is collected."""

    rank = 0

    def mesh(self, world: int) -> Mesh:
        if world != 1:
            raise UserError(f"strategy 'single' runs on 1 device, not on {world}; valid: devices = 1")
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


def make(config: NoParameters, ctx: Context) -> ParallelStrategy:
    return Single()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parallel", "single", make, summary="one rank holds the whole model")]
