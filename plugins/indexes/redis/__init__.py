"""The redis index: the mirror of the memory index, and Redis or Valkey behind it.

Workers publish leases, event batches and snapshots; this side only reads. A gateway that starts anew, or has
lost its place, takes a worker's cache from there; frames of connected workers feed the mirror as ever, so
nothing on the way of a request waits for Redis. While Redis is away serving goes on from the mirror.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from bien.core.api import Context, Provider, UserError, hookimpl
from bien.gateway.api import Publication, check_redis_url
from bien.plugins.indexes._mirror.table import TableChoice

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Bytes = Annotated[int, msgspec.Meta(ge=65536)]


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `kv_index = { use = "redis", … }`."""

    url: str = "redis://127.0.0.1:6379/0"  # or "embedded": a private server, where a stack starts it
    namespace: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.\-]{1,64}\Z")] = "bien"
    on_failure: Literal["refuse", "mirror"] = "refuse"  # at the start; later it is always the mirror
    lease_seconds: Seconds = 9.0  # a worker that says nothing for so long is gone
    keep_seconds: Seconds = 60.0  # that events and snapshots outlive the last worker
    stream_entries: Annotated[int, msgspec.Meta(ge=16)] = 8192
    stream_bytes: Bytes = 64 << 20
    snapshot_bytes: Bytes = 64 << 20  # a larger one is not published; then workers are asked
    flush_seconds: Seconds = 1.0  # that a worker gathers batches for one entry, unless a gateway joins it
    poll_seconds: Seconds = 0.1  # between looks at the stream
    timeout_seconds: Seconds = 2.0  # of one command
    reservations: bool = True  # gateways that route at once tell each other, where there are several
    # That any request waits for its reservation; longer where answers take longer, up to half of its work.
    reserve_seconds: Seconds = 0.01
    table: TableChoice = "auto"  # of the mirror, as of index "memory"

    @property
    def publication(self) -> Publication:
        shared = {name: getattr(self, name) for name in Publication.__struct_fields__}
        return Publication(**shared)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "kv_index",
            "redis",
            _build,
            RedisConfig,
            summary="the mirror, with leases, events and snapshots in Redis or Valkey: survives its gateway",
        )
    ]


def _build(config: RedisConfig, ctx: Context) -> Any:
    from bien.plugins.indexes.redis.index import RedisIndex

    if config.url == "embedded":
        raise UserError(
            "gateway.kv_index.url is 'embedded', and nothing has started a server for it; "
            "valid here: the URL of a Redis",
            field="gateway.kv_index.url",
        )
    check_redis_url(config.url)
    return RedisIndex(config, ctx)
