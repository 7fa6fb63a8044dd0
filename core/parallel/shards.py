"""KV groups of one rank. No torch."""

from __future__ import annotations

import msgspec

from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.parallel.strategy import ParallelStrategy

HEADED = (GroupKind.FULL, GroupKind.WINDOW, GroupKind.DRAFT)
"""Kinds whose entries are K heads, then V heads; ranks hold heads of them. All others are whole on each."""


def headed(group: KVGroup) -> bool:
    """Whether ranks hold KV heads of this group, not all of it."""
    return group.shardable and group.kind in HEADED


def rank_groups(
    groups: tuple[KVGroup, ...], strategy: ParallelStrategy, kv_heads: int
) -> tuple[KVGroup, ...]:
    """What one rank keeps of an engine's groups: of attention's keys and values its own heads."""
    held = len(strategy.kv_shard(kv_heads))
    return tuple(
        msgspec.structs.replace(g, bytes_per_token=g.bytes_per_token // kv_heads * held) if headed(g) else g
        for g in groups
    )


def engine_bytes(group: KVGroup, kv_heads: int, ranks: int) -> int:
    """Bytes that one block of a group takes on all ranks together: a head is on one of them, or on several
    when there are fewer heads than ranks."""
    if headed(group):
        return group.block_bytes // kv_heads * max(kv_heads, ranks)
    return group.block_bytes * ranks
