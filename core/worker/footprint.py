"""What one worker takes of this machine's memory, estimated before anything is loaded. No torch.

Pages of the checkpoint that loading has read and that no tensor keeps are not counted: the system takes
them back when it needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bien.core.architectures.base import Architecture
from bien.core.architectures.fields import ITEM_BYTES
from bien.core.compose import PoolComposition
from bien.core.deployment import ModelSpec, PoolSpec
from bien.core.kv.groups import KVGroup
from bien.core.providers import Context
from bien.core.sizing import kv_bytes, sized
from bien.core.speculation.prediction import MOST as PREDICTED

MB = 1_000_000
PROCESS = 60 * MB  # an interpreter with the engine, measured
TORCH = 200 * MB  # more with torch, its libraries and what its allocator leaves lying, measured
TOKEN_BUDGET = 2048  # of a scheduler whose parameters have no `token_budget`
DRAWING = 24  # bytes per logit while rows are sorted and drawn from
MASKED = 6  # bytes per (token of a chunk, position before it) beside the mask's own


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one worker, all its ranks together, and what is not known of it."""

    pool: PoolSpec  # sized
    weights: int = 0
    kv: int = 0
    store: int = 0  # capacity of the KV store
    workspace: int = 0  # largest step
    process: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.store + self.workspace + self.process


def footprint(pool: PoolComposition, architecture: Architecture, model: ModelSpec) -> Footprint:
    """The estimate for one worker of `pool`. What lies on other devices, and what executors other than
    `torch` need, is left out and said in `unknown`. DeploymentError where `kv_memory` is too small; what the
    strategy raises where it cannot cut this model over `devices`."""
    if pool.spec.devices > 1:
        _check_mesh(pool, architecture)
    unknown: list[str] = []
    groups = architecture.groups + _drafter_groups(pool, architecture, model, unknown)
    if pool.spec.executor.use == "simulated":
        return Footprint(pool.spec, process=PROCESS)
    spec = sized(pool.spec, groups)
    store = _store(pool, groups, unknown)
    if spec.executor.use != "torch":
        unknown.append(f"what executor {spec.executor.use!r} takes")
        return Footprint(spec, store=store, process=PROCESS, unknown=tuple(unknown))
    ranks = spec.devices
    process = ranks * (PROCESS + TORCH)
    if spec.device != "cpu":
        unknown.append(f"memory of {spec.device}; workers ask it when they start")
        return Footprint(spec, store=store, process=process, unknown=tuple(unknown))
    item = ITEM_BYTES[model.dtype]
    copies = max(1, ranks // architecture.kv_heads)  # of heads that are fewer than ranks
    return Footprint(
        spec,
        weights=_weights(pool, architecture, item, unknown),
        kv=kv_bytes(groups, spec) * copies,
        store=store,
        workspace=ranks * _workspace(pool, spec, architecture, item),
        process=process,
        unknown=tuple(unknown),
    )


def _check_mesh(pool: PoolComposition, architecture: Architecture) -> None:
    strategy = pool.make("parallel", Context(architecture=architecture, groups=architecture.groups))
    try:
        strategy.mesh(pool.spec.devices)
    finally:
        strategy.close()


def _weights(pool: PoolComposition, a: Architecture, item: int, unknown: list[str]) -> int:
    part = pool.parts["quantizer"]
    says = getattr(part.config, "bytes_per_parameter", None)
    if says is None:
        unknown.append(f"quantizer {part.provider.name!r} does not say its size: full precision is assumed")
    table = a.vocab_size * a.hidden_size
    tied = bool(a.config.get("tie_word_embeddings"))
    layer, head = (says(name, item) if says else None for name in ("layers", "lm_head"))
    linear = (a.parameters - table * (1 if tied else 2)) * (item if layer is None else layer)
    own = 0 if tied and head is None else item if head is None else head
    # Ranks share the linear layers; embedding and head may be whole in each.
    return int(linear + pool.spec.devices * table * (item + own))


def _workspace(pool: PoolComposition, spec: PoolSpec, a: Architecture, item: int) -> int:
    """Of the largest step: activations and the attention mask of a full chunk behind the longest context,
    one layer's KV of that context gathered, logits of all slots while they are drawn from, slot state."""
    tokens = getattr(pool.parts["scheduler"].config, "token_budget", TOKEN_BUDGET)
    drafter: Any = pool.parts["speculator"].config if "speculator" in pool.parts else None
    drafts = getattr(drafter, "max_drafts", 0)
    if drafts is None:  # as many as its checkpoint says
        drafts = drafter.drafts()
    drafts = drafts if spec.speculation.max_drafts is None else min(drafts, spec.speculation.max_drafts)
    held = spec.kv_tokens if any(g.paged for g in a.groups) else None
    context = min(a.max_context, held or a.max_context)
    chunk = min(tokens, context * spec.slots)
    inner = int(a.config.get("intermediate_size") or 4 * a.hidden_size)
    wide = max(item, 4)  # some products are accumulated in float32
    width = 4 * a.hidden_size + 3 * inner + 2 * (a.heads + 2 * a.kv_heads) * a.head_dim
    masks = min(chunk, context) * context * (item + MASKED)
    gathered = context * max((g.bytes_per_token // len(g.layers) for g in a.groups if g.paged), default=0)
    predicted = 0 if spec.speculation.max_drafts == 0 else PREDICTED  # by clients
    logits = (spec.slots * (1 + drafts) + predicted) * a.vocab_size * DRAWING
    slots = spec.slots * a.max_context * 10  # ids of tokens, and block tables
    return chunk * width * wide + masks + gathered + logits + slots


def _store(pool: PoolComposition, groups: tuple[KVGroup, ...], unknown: list[str]) -> int:
    part = pool.parts.get("kv_store")
    if part is None:
        return 0
    says = getattr(part.config, "host_bytes", None)
    if says is None:
        unknown.append(f"capacity of kv_store {part.provider.name!r}")
        return 0
    return int(says(groups))


def _drafter_groups(
    pool: PoolComposition, architecture: Architecture, model: ModelSpec, unknown: list[str]
) -> tuple[KVGroup, ...]:
    part = pool.parts.get("speculator")
    if part is None:
        return ()
    says = getattr(part.config, "groups", None)
    if says is None:
        unknown.append(f"KV and weights of speculator {part.provider.name!r}, if it has any")
        return ()
    found: tuple[KVGroup, ...] = says(architecture, model.block_tokens)
    return found
