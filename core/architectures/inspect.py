"""What an architecture weighs, caches and computes, as plain data. No torch, no weights."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bien.core.architectures.base import Architecture
from bien.core.architectures.fields import ITEM_BYTES
from bien.core.architectures.weights import flops
from bien.core.kv.groups import KVGroup

CONTEXTS = (1_000, 10_000, 100_000, 1_000_000)  # at which FLOPs are shown, up to the model's own


def describe(a: Architecture, dtype: str) -> dict[str, Any]:
    """JSON-ready. Bytes are those of `dtype`, but for states, which say their own; "mtp" weights are listed
    by their class and counted nowhere else."""
    main = [w for w in a.weights if w.role != "mtp"]
    sizes: dict[str, int] = defaultdict(int)
    for w in a.weights:
        if not w.spare:
            sizes[w.role] += w.size * w.copies * ITEM_BYTES[dtype]
    used = sum(w.size * w.used for w in main)
    table = sum(w.size for w in main if w.role == "embedding")
    return {
        "model": a.model,
        "architecture": a.name,
        "dtype": dtype,
        "layers": a.layers,
        "hidden_size": a.hidden_size,
        "vocab_size": a.vocab_size,
        "max_context": a.max_context,
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "parameters": {
            "total": sum(w.size * w.copies for w in main),
            "active": used,
            "active_without_embedding": used - table,
        },
        "weight_bytes": dict(sizes),
        "unread_fields": list(a.unread),
        "groups": [_group(group) for group in a.groups],
        "kv_bytes_per_token": sum(g.bytes_per_token // g.stride for g in a.groups if _grows(g)),
        "kv_constant_bytes": sum(_constant(g) for g in a.groups),
        "flops": {
            "linear": flops(main),
            "attention": [
                {
                    "layers": c.layers,
                    "constant": c.layers * c.constant,
                    "per_position": c.layers * c.per_position,
                    "positions": c.cap or None,
                }
                for c in a.attention
            ],
            "per_token": {str(n): a.flops(n) for n in CONTEXTS if n <= a.max_context},
        },
    }


def _group(g: KVGroup) -> dict[str, Any]:
    return {
        "name": g.name,
        "kind": g.kind.value,
        "layers": len(g.layers),
        "bytes_per_token": g.bytes_per_token if g.paged else 0,
        "stride": g.stride,
        "window": g.window or None,
        "constant_bytes": _constant(g),
        "dtype": g.dtype,
    }


def _grows(g: KVGroup) -> bool:
    return g.paged and not g.window


def _constant(g: KVGroup) -> int:
    # A window's keys and values are held, a state is; both however long the context.
    return g.bytes_per_token * g.window if g.window else g.constant_bytes
