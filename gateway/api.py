"""The door for authors of routers and indexes, beside `bien.core.api`."""

from __future__ import annotations

from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.gateway.index import KVIndex
from bien.gateway.routing import Decision, Outcome, Router, RouteRequest, Target, cached_tokens

__all__ = [
    "Decision",
    "KVIndex",
    "Outcome",
    "RouteRequest",
    "Router",
    "Target",
    "WorkerInfo",
    "WorkerStats",
    "cached_tokens",
]
