"""The door for authors of routers and indexes, beside `bien.core.api`."""

from __future__ import annotations

from bien.core.worker.messages import Snapshot, WorkerInfo, WorkerStats
from bien.core.worker.published import (
    FIELD,
    DecodingError,
    Entry,
    Keys,
    Lease,
    Publication,
    fps_key,
    read_batches,
    read_entry,
    read_lease,
    read_snapshot,
)
from bien.core.worker.redis_link import ask, check_redis_url, explained, masked, redis_client, redis_trouble
from bien.gateway.index import DurableIndex, IndexHealth, KVIndex, TieredIndex
from bien.gateway.routing import Decision, Outcome, Router, RouteRequest, Target, cached_tokens

__all__ = [
    "FIELD",
    "Decision",
    "DecodingError",
    "DurableIndex",
    "Entry",
    "IndexHealth",
    "KVIndex",
    "Keys",
    "Lease",
    "Outcome",
    "Publication",
    "RouteRequest",
    "Router",
    "Snapshot",
    "Target",
    "TieredIndex",
    "WorkerInfo",
    "WorkerStats",
    "ask",
    "cached_tokens",
    "check_redis_url",
    "explained",
    "fps_key",
    "masked",
    "read_batches",
    "read_entry",
    "read_lease",
    "read_snapshot",
    "redis_client",
    "redis_trouble",
]
