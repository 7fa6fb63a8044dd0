"""KV groups: what an architecture caches, declared once, without torch.

Layers that share shape and lifetime form a group; each group has its own pool of blocks. The usable
cached prefix of a sequence is the longest position where *every* group holds.
"""

from __future__ import annotations

from enum import Enum

import msgspec

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


class GroupKind(str, Enum):
    FULL = "full"  # keys and values of every position
    WINDOW = "window"  # keys and values of the last `window` positions
    LATENT = "latent"  # MLA latent of every position
    INDEXER = "indexer"  # indexer keys of every position
    COMPRESSED = "compressed"  # one entry per `stride` positions
    STATE = "state"  # one recurrent state per sequence; shared through snapshots
    DRAFT = "draft"  # a drafter's own layers; cached like FULL


class SnapshotPolicy(msgspec.Struct, frozen=True):
    """Where snapshots of a state are kept: the last block boundary of a prompt and of a finished turn
    always, and every `every_tokens` tokens on the way (0: nowhere else)."""

    every_tokens: int = 0


class KVGroup(msgspec.Struct, frozen=True):
    """One group. `bytes_per_token` counts all its layers; a STATE group has `constant_bytes` instead."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    block_tokens: int
    bytes_per_token: int = 0
    constant_bytes: int = 0
    stride: int = 1
    window: int = 0  # positions, 0 = unbounded
    croppable: bool = True  # positions at the end can be dropped after a rejected draft
    snapshot: SnapshotPolicy = SnapshotPolicy()
    dtype: str = "float32"
    shardable: bool = True
    width: int = 0  # of a `boundary_group`: elements of a state

    @property
    def paged(self) -> bool:
        """Whether it has one block per `block_tokens` positions (STATE has one block per state)."""
        return self.kind is not GroupKind.STATE

    @property
    def block_bytes(self) -> int:
        if not self.paged:
            return self.constant_bytes
        return self.bytes_per_token * self.block_tokens // self.stride


def boundary_group(name: str, width: int, block_tokens: int, dtype: str) -> KVGroup:
    """A drafter's own group that holds one state of `width` elements per block: that behind the block's last
    confirmed position (`Rows.load_boundary`, `Rows.store_boundary`). What follows a block needs no earlier
    hidden states, so that prefix hits, preemptions and transfers need none either."""
    each = -(-width // block_tokens) * ITEM_BYTES[dtype]
    return KVGroup(name, GroupKind.DRAFT, (0,), block_tokens, each, dtype=dtype, shardable=False, width=width)
