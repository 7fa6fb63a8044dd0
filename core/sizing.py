"""How many blocks each KV group of a worker gets, from tokens or from bytes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bien.core.costs.memory import Room
from bien.core.deployment import KV_TOKENS, PoolSpec
from bien.core.errors import DeploymentError
from bien.core.kv.groups import KVGroup


def sized(spec: PoolSpec, groups: Iterable[KVGroup], room: Room | None = None) -> PoolSpec:
    """`spec` with `kv_tokens` in the place of `kv_memory`: as many whole blocks of tokens as those bytes
    hold in all `groups` together, after the states that slots and snapshots need and each null block.
    Where neither is given, what fits into `room`.

    DeploymentError with the numbers when that is not one block.
    """
    if spec.kv_tokens is None and spec.kv_memory is None:
        if room is None:
            return msgspec.structs.replace(spec, kv_tokens=KV_TOKENS)
        try:
            return sized(msgspec.structs.replace(spec, kv_memory=room.bytes), room.groups)
        except DeploymentError as error:
            raise DeploymentError(f"{error}: {room.text}", field="kv_tokens") from None
    if spec.kv_memory is None:
        return spec
    groups = tuple(groups)
    paged = [group for group in groups if group.paged]
    states = sum(g.block_bytes * (pool_blocks(g, spec) + 1) for g in groups if not g.paged)
    fixed = states + sum(g.block_bytes for g in paged)  # with the null blocks
    size = max((g.block_tokens for g in paged), default=1)
    each = sum(g.block_bytes * (size // g.block_tokens) for g in paged)  # of `size` tokens
    blocks = (spec.kv_memory - fixed) // each if each else int(spec.kv_memory >= fixed)
    if blocks < 1:
        states_take = f"states take {states:,}, " * bool(states)
        raise DeploymentError(
            f"pool {spec.name!r}: kv_memory is {spec.kv_memory:,} bytes; {states_take}null blocks "
            f"{fixed - states:,}, {size} tokens {each:,}; valid: at least {fixed + each:,}",
            field="kv_memory",
        )
    return msgspec.structs.replace(spec, kv_tokens=blocks * size, kv_memory=None)


def pool_blocks(group: KVGroup, spec: PoolSpec) -> int:
    """Usable blocks of a group in one worker whose pool is `sized`. DeploymentError when there is not even
    one."""
    if not group.paged:
        return spec.slots + spec.snapshots  # each running sequence holds a live state
    assert spec.kv_tokens is not None
    blocks = spec.kv_tokens // group.block_tokens
    if blocks < 1:
        raise DeploymentError(
            f"pool {spec.name!r}: kv_tokens is {spec.kv_tokens}; valid: at least one block of "
            f"{group.block_tokens} tokens",
            field="kv_tokens",
        )
    return blocks


def kv_bytes(groups: Iterable[KVGroup], spec: PoolSpec) -> int:
    """What one worker's KV pools take, each with its null block; the pool is `sized`."""
    return sum(group.block_bytes * (pool_blocks(group, spec) + 1) for group in groups)
