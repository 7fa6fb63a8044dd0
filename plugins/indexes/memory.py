"""The memory index: the mirror and nothing beside it. What a gateway that starts anew does not know, it asks
the workers for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bien.core.api import Context, Provider, hookimpl
from bien.plugins.indexes._mirror import Mirror
from bien.plugins.indexes._mirror.metrics import MirrorCollector
from bien.plugins.indexes._mirror.table import TableChoice


class MemoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `kv_index = { use = "memory", … }`."""

    table: TableChoice = "auto"  # compiled where there is a compiler; "native" insists on it


class MemoryIndex(Mirror):
    """A `TieredIndex` in this process."""


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "kv_index",
            "memory",
            _build,
            MemoryConfig,
            summary="mirror of every worker's blocks in this process, fed by KV events",
        )
    ]


def _build(config: MemoryConfig, ctx: Context) -> MemoryIndex:
    index = MemoryIndex(ctx.clock, config.table)
    if ctx.metrics is not None:
        ctx.metrics.register(MirrorCollector(index))
    return index
