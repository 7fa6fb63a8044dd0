"""`KVCache`: pools, prefix tree and block tables of one engine. SKELETON: signatures only for now."""

from __future__ import annotations

from dataclasses import dataclass

from bien.core.kv.events import KVEvent
from bien.core.kv.groups import KVGroup


class SequenceKV:
    """Block tables of one running sequence, one per group."""

    def take_updates(self, group: int) -> list[tuple[int, int]]:
        """(index, block) entries that changed since the last call, for the executor's block tables.
        STATE groups have index 0 = the live block."""
        raise NotImplementedError


@dataclass(slots=True)
class Match:
    """What the device holds of a chain. `blocks` = usable prefix in blocks, over all groups."""

    blocks: int
    present: list[object]  # per group: numpy bool array over the chain's blocks


@dataclass(slots=True)
class Missing:
    """Blocks of one group that were reserved for content that a lower tier holds."""

    group: int
    hashes: bytes
    blocks: list[int]


class KVCache:
    def __init__(
        self, groups: tuple[KVGroup, ...], blocks: tuple[int, ...], block_tokens: int, max_sequences: int
    ) -> None:
        """blocks[g] usable blocks in group g's pool, ids 1..blocks[g]; 0 is the null block."""
        raise NotImplementedError

    def match(self, hashes: bytes) -> Match:
        """What is on the device for this chain. No side effect but recency at `attach`."""
        raise NotImplementedError

    def attach(self, hashes: bytes, match: Match, blocks: int) -> tuple[SequenceKV, list[Missing]] | None:
        """A new sequence that uses the first `blocks` blocks of the chain: device blocks are referenced,
        fresh blocks are reserved for what `match` lacks (to be loaded from a store; empty list when
        blocks <= match.blocks). STATE groups get a live block; `restore(kv, g)` names the snapshot block.
        None: not enough memory, nothing changed."""
        raise NotImplementedError

    def restore(self, kv: SequenceKV, group: int) -> tuple[int, int]:
        """(snapshot block or 0 for the zero state, live block) of a STATE group after `attach`."""
        raise NotImplementedError

    def reserve(self, kv: SequenceKV, tokens: int) -> bool:
        """Blocks for positions < tokens in every paged group (WINDOW: those inside the window), evicting
        cached unreferenced blocks, least recently used first. All or nothing."""
        raise NotImplementedError

    def commit(self, kv: SequenceKV, hashes: bytes, tokens: int) -> None:
        """Positions < tokens are confirmed and computed: full blocks among them become shared under
        their `hashes` (chain of the sequence). A block whose hash is already cached stays private."""
        raise NotImplementedError

    def slide(self, kv: SequenceKV, tokens: int) -> None:
        """The next computed position is `tokens`: WINDOW blocks behind the window are let go (cached
        ones stay cached, evictable)."""
        raise NotImplementedError

    def snapshot_block(self, kv: SequenceKV, group: int) -> int:
        """A block of a STATE group to take a snapshot into, held by `kv` until kept or dropped; 0: none."""
        raise NotImplementedError

    def keep_snapshot(self, kv: SequenceKV, group: int, hashes: bytes, tokens: int, block: int) -> None:
        """The snapshot at `tokens` (a block boundary, committed) becomes shared under its hash."""
        raise NotImplementedError

    def drop_snapshot(self, kv: SequenceKV, group: int, block: int) -> None:
        """The snapshot did not happen, or is superseded (then `evict=True` semantics do not apply)."""
        raise NotImplementedError

    def release(self, kv: SequenceKV) -> None:
        """The sequence ended or was preempted: references are dropped, private blocks are free."""
        raise NotImplementedError

    def pin(self, group: int, blocks: list[int]) -> None:
        """Hold blocks for a transfer."""
        raise NotImplementedError

    def unpin(self, group: int, blocks: list[int]) -> None:
        raise NotImplementedError

    def take_committed(self) -> list[tuple[int, bytes, list[int]]]:
        """(group, hashes, blocks) newly shared since the last call: what a store may save."""
        raise NotImplementedError

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        raise NotImplementedError

    def snapshot(self) -> list[KVEvent]:
        """All cached blocks as "stored" events (parents first)."""
        raise NotImplementedError

    def available(self, group: int) -> int:
        """Free plus evictable blocks."""
        raise NotImplementedError

    def usage(self, group: int) -> tuple[int, int, int]:
        """(referenced, cached unreferenced, free) blocks; their sum is the pool's size."""
        raise NotImplementedError

    def check_integrity(self, live: list[SequenceKV]) -> None:
        """AssertionError unless free + cached + referenced = total in every pool, reference counts equal
        the holds of `live` and the pins, and tree and pools agree."""
        raise NotImplementedError
