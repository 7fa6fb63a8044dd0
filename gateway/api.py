"""The door for authors of routers, indexes and engines, beside `bien.core.api`."""

from __future__ import annotations

from bien.core.text.marks import Mark, Piece
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
    read_seqs,
    read_snapshot,
    seq_field,
    seq_fields,
)
from bien.core.worker.redis_link import (
    ask,
    close_redis,
    explained,
    redis_client,
    redis_trouble,
    run_script,
)
from bien.core.worker.redis_url import check_redis_url, masked
from bien.gateway.index import DurableIndex, IndexHealth, KVIndex, LeasedIndex, TieredIndex
from bien.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Reasoning,
    Text,
    merged,
)
from bien.gateway.parsing.json_text import JsonText, quoted
from bien.gateway.parsing.parser import AnswerParser, Messages, Opening, Parser, Speller
from bien.gateway.parsing.reader import Ended, Reader, Steps
from bien.gateway.parsing.script import KEY, NAME, Script, Thinking, unwrapped
from bien.gateway.parsing.tools import TYPES, Tools
from bien.gateway.parsing.values import Value
from bien.gateway.remote.alarms import EventWatch
from bien.gateway.remote.client import RemoteClient
from bien.gateway.remote.dialect import Dialect, Readings
from bien.gateway.remote.endpoint import Endpoint
from bien.gateway.remote.engine import Engine, RemoteEngine, endpoints
from bien.gateway.remote.follow import Lost, Numbered, Source
from bien.gateway.routing import Decision, Outcome, Router, RouteRequest, Target, cached_tokens
from bien.gateway.sharing import Bid, BiddingRouter, Reservations, Reserved

__all__ = [
    "FIELD",
    "KEY",
    "NAME",
    "TYPES",
    "AnswerParser",
    "Bid",
    "BiddingRouter",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Decision",
    "DecodingError",
    "Dialect",
    "DurableIndex",
    "Ended",
    "Endpoint",
    "Engine",
    "Entry",
    "Event",
    "EventWatch",
    "IndexHealth",
    "JsonText",
    "KVIndex",
    "Keys",
    "Lease",
    "LeasedIndex",
    "Lost",
    "Mark",
    "Messages",
    "Numbered",
    "Opening",
    "Outcome",
    "Parser",
    "Piece",
    "Publication",
    "Reader",
    "Readings",
    "Reasoning",
    "RemoteClient",
    "RemoteEngine",
    "Reservations",
    "Reserved",
    "RouteRequest",
    "Router",
    "Script",
    "Snapshot",
    "Source",
    "Speller",
    "Steps",
    "Target",
    "Text",
    "Thinking",
    "TieredIndex",
    "Tools",
    "Value",
    "WorkerInfo",
    "WorkerStats",
    "ask",
    "cached_tokens",
    "check_redis_url",
    "close_redis",
    "endpoints",
    "explained",
    "fps_key",
    "masked",
    "merged",
    "quoted",
    "read_batches",
    "read_entry",
    "read_lease",
    "read_seqs",
    "read_snapshot",
    "redis_client",
    "redis_trouble",
    "run_script",
    "seq_field",
    "seq_fields",
    "unwrapped",
]
