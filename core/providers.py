"""`Provider`: what a plugin offers. Hooks return them at composition; nothing is constructed yet."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from bien.core.clock import Clock, WallClock
from bien.core.speculation.options import SpeculationSpec

if TYPE_CHECKING:
    from bien.core.architectures.base import Architecture
    from bien.core.executors.base import BlockIO
    from bien.core.executors.ranks import Ranks
    from bien.core.kv.groups import KVGroup
    from bien.core.parallel.strategy import Mesh

API = 0
"""Plugin API number of this host. `0` until models, KV plane, speculation and simulation have used it."""

KINDS = (
    "scheduler",
    "parallel",
    "quantizer",
    "speculator",
    "kv_store",
    "router",
    "architecture",
    "executor",
    "kernels",
    "kv_index",
    "engine",
    "trace_format",
    "parser",
    "observer",
)


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    """The config type of a provider without parameters."""


@dataclass(slots=True)
class Context:
    """What a factory may use. Fields that a kind has no use for are None."""

    clock: Clock = field(default_factory=WallClock)
    rng: random.Random = field(default_factory=random.Random)
    metrics: Any = None  # prometheus_client.CollectorRegistry of the process
    tracer: Any = None  # opentelemetry Tracer
    architecture: Architecture | None = None
    groups: tuple[KVGroup, ...] = ()
    mesh: Mesh | None = None
    io: BlockIO | None = None  # kv_store
    dtype: str = "float32"  # executor, quantizer
    device: str = "cpu"
    threads: int = 1
    ranks: Ranks | None = None  # executor: where mesh.world > 1, how the other ranks are reached
    pool: str = ""  # engine: what its workers' ids begin with
    model: str = ""  # engine: the deployment's name of it
    block_tokens: int = 16  # engine: of the gateway's index
    hash_key: bytes = b""  # engine: keys the hash chains of requests without a tenant
    speculation: SpeculationSpec = field(default_factory=SpeculationSpec)  # executor: how drafts are verified
    parts: dict[str, Any] = field(default_factory=dict)  # executor: its quantizer, parallel, speculator


@dataclass(frozen=True, slots=True)
class Provider:
    """A named implementation of one kind.

    `factory(config, ctx)` gets an instance of `config_type` (a msgspec Struct with
    forbid_unknown_fields) and returns an object of the kind's protocol, with `close()`.
    """

    kind: str
    name: str
    factory: Callable[[Any, Context], Any]
    config_type: type[msgspec.Struct] = NoParameters
    api: int = API
    summary: str = ""
