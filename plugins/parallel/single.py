"""Parallel strategy `single`: one rank holds everything."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import (
    Context,
    Mesh,
    NoParameters,
    ParallelStrategy,
    Provider,
    UserError,
    Whole,
    hookimpl,
)


class Single(Whole):
    def mesh(self, world: int) -> Mesh:
        if world != 1:
            raise UserError(f"strategy 'single' runs on 1 device, not on {world}; valid: devices = 1")
        return Mesh()


def make(config: NoParameters, ctx: Context) -> ParallelStrategy:
    return Single()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parallel", "single", make, summary="one rank holds the whole model")]
