"""The memory index: the mirror and nothing beside it. What a gateway that starts anew does not know, it asks
the workers for."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.plugins.indexes._mirror import Mirror


class MemoryIndex(Mirror):
    """A `KVIndex` in this process."""


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "kv_index",
            "memory",
            _build,
            summary="mirror of every worker's blocks in this process, fed by KV events",
        )
    ]


def _build(config: NoParameters, ctx: Context) -> MemoryIndex:
    return MemoryIndex(ctx.clock)
