"""Whether the workers of a deployment fit into this machine's memory, said before any of them is started."""

from __future__ import annotations

from bien.core.architectures.base import Architecture
from bien.core.architectures.llama import ITEM_BYTES
from bien.core.architectures.registry import read_architecture
from bien.core.build import pool_blocks
from bien.core.compose import Composition
from bien.core.deployment import ModelSpec, PoolSpec
from bien.core.errors import ResourceError
from bien.core.memory import available_host_bytes

QUANTIZED = 0.5  # bytes of a parameter, at least: the smallest in use has four bits


def check_memory(composition: Composition, model: ModelSpec, available: int | None = None) -> None:
    """ResourceError with the numbers when weights and KV pools of all workers exceed the memory available.

    `model` has the folder that the name was resolved to. A low estimate: weights are copied by each worker
    (into fused and transposed ones), activations and a drafter's own KV come on top. Pools on other devices
    and of other executors than `torch` are not counted: what those need is not known here.
    """
    architecture = read_architecture(model.name, model.block_tokens, model.dtype)
    free = available_host_bytes() if available is None else available
    need, lines = 0, []
    for pool in (p.spec for p in composition.pools):
        if pool.device != "cpu" or pool.executor.use != "torch":
            continue
        weights, kv = weight_bytes(architecture, model, pool), kv_bytes(architecture, pool)
        need += pool.count * (weights + kv)
        lines.append(f"pool {pool.name!r}: {pool.count} x ({_mb(weights)} of weights + {_mb(kv)} of KV)")
    if need > free:
        raise ResourceError(
            f"the workers need {_mb(need)} of memory at least ({'; '.join(lines)}), {_mb(free)} are "
            "available; lower count, kv_tokens or slots of the pools, or take a smaller model.dtype"
        )


def weight_bytes(architecture: Architecture, model: ModelSpec, pool: PoolSpec) -> int:
    """What one worker's weights take, at least."""
    item = ITEM_BYTES[model.dtype] if pool.quantizer.use == "none" else QUANTIZED
    return int(architecture.parameters * item)


def kv_bytes(architecture: Architecture, pool: PoolSpec) -> int:
    """What one worker's KV pools take, each with its null block."""
    return sum(group.block_bytes * (pool_blocks(group, pool) + 1) for group in architecture.groups)


def _mb(size: int) -> str:
    return f"{-(-size // 1_000_000):,} MB"
