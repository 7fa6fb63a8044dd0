"""`deployment.toml`: what a composition is made of. Strict: unknown keys are errors with path and hint."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Selection(msgspec.Struct, frozen=True):
    """One plugin of a kind: `use = "name"`, every other key is one of its parameters."""

    use: str
    parameters: dict[str, Any] = {}


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`name` is a built-in name ("smollm2-135m"), or a folder with config.json and safetensors."""

    name: str = "smollm2-135m"
    dtype: str = "float32"
    block_tokens: int = 16
    max_context: int | None = None  # None: the model's own


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers of one kind. `kv_tokens` is the capacity of each paged group's pool, in tokens."""

    name: str = "main"
    role: Literal["prefill", "decode", "both"] = "both"
    count: int = 1
    device: str = "cpu"
    devices: int = 1  # ranks of one engine
    threads: int | None = None  # None: max(1, cores // local workers)
    kv_tokens: int = 32768
    snapshots: int = 64  # blocks of each STATE group beyond one per slot
    slots: int = 16  # sequences with KV at a time
    scheduler: Selection = Selection("fcfs")
    parallel: Selection = Selection("single")
    quantizer: Selection = Selection("none")
    executor: Selection = Selection("torch")
    speculator: Selection | None = None
    kv_store: Selection | None = None


class GatewaySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port, printed
    max_inflight: int = 256  # requests admitted at a time; more get 503 with Retry-After
    secret: str = ""  # keys the tenants' hash chains
    router: Selection = Selection("kv-aware")
    kv_index: Selection = Selection("memory")


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that `compose()` needs. `plugins` are third-party plugins to activate although no
    selection names them (observers)."""

    model: ModelSpec = ModelSpec()
    gateway: GatewaySpec = GatewaySpec()
    pool: tuple[PoolSpec, ...] = (PoolSpec(),)
    plugins: tuple[str, ...] = ()
