"""`KVCache`: pools, prefix tree and block tables of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bien.core.errors import DeploymentError
from bien.core.kv.events import KVEvent
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.integrity import check
from bien.core.kv.log import ChangeLog
from bien.core.kv.pool import I32, BlockPool
from bien.core.kv.prefix import Bools, usable_blocks, window_start
from bien.core.kv.table import SequenceKV
from bien.core.kv.tree import Index, Node, Path, PrefixTree, runs

_NOTHING: Index = np.empty(0, np.intp)
__all__ = ["KVCache", "Match", "Missing", "SequenceKV"]


@dataclass(slots=True)
class Match:
    """What the device holds of a chain. `blocks` = usable prefix in blocks, over all groups."""

    blocks: int
    present: list[Bools]  # per group, over the chain's blocks
    depth: int = 0  # blocks of the chain that are in the tree at all
    path: Path = field(default_factory=list)
    version: int = -1  # of the tree; an outdated match is made again at attach


@dataclass(slots=True)
class Missing:
    """Blocks of one group that were reserved for content that a lower tier holds."""

    group: int
    hashes: bytes
    blocks: list[int]


class KVCache:
    """One thread only: the engine's."""

    def __init__(
        self, groups: tuple[KVGroup, ...], blocks: tuple[int, ...], block_tokens: int, max_sequences: int
    ) -> None:
        """blocks[g] usable blocks in group g's pool, ids 1..blocks[g]; 0 is the null block.

        DeploymentError: a group has another block size, a pool is empty, or a STATE pool has less than
        one live block for each of `max_sequences` sequences.
        """
        _check_sizes(groups, blocks, block_tokens, max_sequences)
        self.groups = groups
        self.block_tokens = block_tokens
        self.pools = [BlockPool(n) for n in blocks]
        self.log = ChangeLog(self.pools)
        self.tree = PrefixTree(groups, self.pools, self.log)
        self.paged = [g for g, group in enumerate(groups) if group.paged]
        self.states = [g for g, group in enumerate(groups) if not group.paged]
        self.windows = [g for g in self.paged if g in self.tree.others and groups[g].window]

    def match(self, hashes: bytes) -> Match:
        """What is on the device for this chain. No side effect but recency at `attach`.

        A sequence must compute at least one token: pass the chain of the first `length - 1` tokens.
        """
        path = self.tree.match(hashes)
        depth = path[-1][0].start + path[-1][1] if path else 0
        whole = np.zeros(len(hashes) // HASH_BYTES, np.bool_)
        whole[:depth] = True
        present = [whole] * len(self.groups)
        for g in self.tree.others:
            present[g] = np.zeros(len(whole), np.bool_)
            for node, n in path:
                present[g][node.start : node.start + n] = node.blocks[g, :n] >= 0
        usable = usable_blocks(self.groups, present) if self.tree.others else depth
        return Match(usable, present, depth, path, self.tree.version)

    def attach(self, hashes: bytes, match: Match, blocks: int) -> tuple[SequenceKV, list[Missing]] | None:
        """A new sequence that uses the first `blocks` blocks of the chain: device blocks are referenced,
        fresh blocks are reserved for what `match` lacks (to be loaded from a store; empty list when
        blocks <= match.blocks and that is where all groups hold). STATE groups get a live block;
        `restore(kv, g)` names the snapshot block. When loads have ended, `commit` at that position
        shares what came; when one failed, `release` and attach with fewer blocks.
        None: not enough memory, nothing changed."""
        if blocks * HASH_BYTES > len(hashes):
            raise ValueError(f"blocks={blocks} is beyond the chain of {len(hashes) // HASH_BYTES} blocks")
        if match.version != self.tree.version:
            match = self.match(hashes)
        kv = SequenceKV(self.groups, self.tree.root, blocks)
        kv.first = [window_start(group, blocks * self.block_tokens) for group in self.groups]
        kv.count, kv.capacity = blocks, blocks * self.block_tokens
        present = self._hold(kv, match, blocks)
        # Anchored groups have all blocks of a path.
        whole = self.tree.anchors if blocks <= match.depth else ()
        lacks = [_NOTHING if g in whole else self._lacks(kv, g) for g in range(len(self.groups))]
        needs = [len(lacking) + (g in self.states) for g, lacking in enumerate(lacks)]
        if any(need > pool.available for need, pool in zip(needs, self.pools, strict=True)):
            for pool, ids in zip(self.pools, present, strict=True):
                pool.unref(ids)
            return None
        missing: list[Missing] = []
        for g, at in enumerate(lacks):
            fresh = self._allocate(g, needs[g])
            if g in self.states:
                kv.live[g], fresh = int(fresh[-1]), fresh[:-1]
            if not len(at):
                continue
            if g in self.states:
                kv.sources[g] = kv.loads[g] = int(fresh[0])
            else:
                kv.blocks[g, at] = fresh
            names = b"".join(hashes[lo * HASH_BYTES : hi * HASH_BYTES] for lo, hi in runs(at))
            missing.append(Missing(g, names, fresh.tolist()))
        # Positions that are loaded into holes of the path are committed again, then found shared.
        kv.committed = min(match.depth, blocks, *(int(at[0]) for at in lacks if len(at)))
        path = [node for node, _ in match.path if node.start < blocks]
        if path:
            lows = [f if g in self.paged else blocks - 1 for g, f in enumerate(kv.first)]
            self.tree.touch(path[-1], lows)
            kv.node = path[-1]
        self._set_slide(kv)
        return kv, missing

    def restore(self, kv: SequenceKV, group: int) -> tuple[int, int]:
        """(snapshot block or 0 for the zero state, live block) of a STATE group after `attach`, until the
        first commit beyond the attached prefix (the snapshot is let go then)."""
        return kv.sources[group], kv.live[group]

    def reserve(self, kv: SequenceKV, tokens: int) -> bool:
        """Blocks for positions < tokens in every paged group (WINDOW: those inside the window), evicting
        cached unreferenced blocks, least recently used first. All or nothing."""
        if tokens <= kv.capacity:
            return True
        count = -(-tokens // self.block_tokens)
        need = count - kv.count
        for g in self.paged:
            if self.pools[g].available < need:
                return False
        kv.grow(count)
        for g in self.paged:
            if need == 1:
                kv.blocks[g, kv.count] = self._take(g)
            else:
                kv.blocks[g, kv.count : count] = self._allocate(g, need)
        kv.count, kv.capacity = count, count * self.block_tokens
        return True

    def commit(self, kv: SequenceKV, hashes: bytes, tokens: int) -> None:
        """Positions < tokens are confirmed and computed: full blocks among them become shared under
        their `hashes` (chain of the sequence). A block whose hash is already cached stays private."""
        stop = min(tokens // self.block_tokens, len(hashes) // HASH_BYTES, kv.count)
        if stop > kv.committed:
            if self.paged:
                self._share(kv, hashes, stop)
            kv.committed = stop
        if self.states and tokens >= kv.attached * self.block_tokens:
            self._settle_sources(kv, hashes, tokens)

    def slide(self, kv: SequenceKV, tokens: int) -> None:
        """The next computed position is `tokens`: WINDOW blocks behind the window are let go (cached
        ones stay cached, evictable)."""
        if not self.windows or tokens < kv.slides_at:
            return
        for g in self.windows:
            old, new = kv.first[g], min(window_start(self.groups[g], tokens), kv.count)
            if new > old:
                self.pools[g].unref(kv.blocks[g, old:new])
                kv.blocks[g, old:new] = 0
                kv.changes[g].extend((i, 0) for i in range(old, min(new, kv.reported[g])))
                kv.first[g] = new
        self._set_slide(kv)

    def snapshot_block(self, kv: SequenceKV, group: int) -> int:
        """A block of a STATE group to take a snapshot into, held by `kv` until kept or dropped; 0: none."""
        if not self.pools[group].available:
            return 0
        block = self._take(group)
        kv.snapshots.setdefault(group, set()).add(block)
        return block

    def keep_snapshot(self, kv: SequenceKV, group: int, hashes: bytes, tokens: int, block: int) -> None:
        """The snapshot at `tokens` (a block boundary, committed) becomes shared under its hash. When one
        is cached there already, this one is freed."""
        depth, rest = divmod(tokens, self.block_tokens)
        if rest or depth < 1 or depth * HASH_BYTES > len(hashes):
            raise ValueError(f"no snapshot at {tokens} tokens: not a boundary of a block with a hash")
        if self.paged and depth > kv.committed:
            raise ValueError(f"no snapshot at {tokens} tokens: {kv.committed} blocks are committed")
        self._share_state(kv, group, block, hashes, depth)
        self.drop_snapshot(kv, group, block)

    def drop_snapshot(self, kv: SequenceKV, group: int, block: int) -> None:
        """The snapshot did not happen, or is superseded (then `evict=True` semantics do not apply).
        Blocks that `kv` does not hold for a snapshot (any more) are left alone."""
        held = kv.snapshots.get(group, set())
        if block in held:
            held.remove(block)
            self.pools[group].drop(block)

    def forget_snapshot(self, group: int, hashes: bytes, tokens: int) -> bool:
        """Uncache the kept snapshot at `tokens` if nobody uses it (a newer one of the same sequence
        supersedes it). Whether there was one."""
        depth = tokens // self.block_tokens
        path = self.tree.match(hashes[: depth * HASH_BYTES])
        if not path or path[-1][0].start + path[-1][1] != depth:
            return False
        node, n = path[-1]
        block = int(node.blocks[group, n - 1])
        if block < 0 or self.pools[group].refs[block]:
            return False
        self.tree.discard(group, node, n - 1)
        return True

    def release(self, kv: SequenceKV) -> None:
        """The sequence ended or was preempted: references are dropped, private blocks are free.
        A second release does nothing."""
        if kv.released:
            return
        kv.released = True
        if kv.committed and self.tree.anchors:
            lows = [f if g in self.paged else kv.committed - 1 for g, f in enumerate(kv.first)]
            self.tree.touch(self.tree.locate(kv.node, kv.committed), lows)
        for g in self.paged:
            self.pools[g].unref(kv.blocks[g, kv.first[g] : kv.count])
        for g, twins in kv.shadows:
            self.pools[g].unref(twins)
        for g in self.states:
            self.pools[g].unref(np.array(kv.held(g), np.int32))

    def pin(self, group: int, blocks: list[int]) -> None:
        """Hold blocks for a transfer. Distinct, and cached or referenced; each pin needs its unpin."""
        self.pools[group].pin(np.array(blocks, np.int32))

    def unpin(self, group: int, blocks: list[int]) -> None:
        """End a `pin`."""
        self.pools[group].unpin(np.array(blocks, np.int32))

    def take_committed(self) -> list[tuple[int, bytes, list[int]]]:
        """(group, hashes, blocks) newly shared since the last call: what a store may save. Blocks that
        were evicted since are left out; pin the others before anything else is allocated."""
        return self.log.take_committed()

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        return self.log.take_events()

    def snapshot(self) -> list[KVEvent]:
        """All cached blocks as "stored" events (parents first)."""
        out: list[KVEvent] = []
        for node in self.tree.nodes():
            for g in range(len(self.groups)):
                for lo, hi in runs((node.blocks[g, : node.size] >= 0).nonzero()[0]):
                    out.append(KVEvent("stored", g, node.hash_before(lo), node.slice(lo, hi)))
        return out

    def meets_cached(self, kv: SequenceKV) -> bool:
        """Whether what it commits next may be cached already, or was: its commits then touch blocks that
        nobody refers to, and so their order of eviction."""
        node = self.tree.locate(kv.node, kv.committed)
        return bool(kv.shadows or node.children or kv.committed < node.end)

    def available(self, group: int) -> int:
        """Free plus evictable blocks."""
        return self.pools[group].available

    def usage(self, group: int) -> tuple[int, int, int]:
        """(referenced, cached unreferenced, free) blocks; their sum is the pool's size."""
        pool = self.pools[group]
        return pool.referenced, pool.idle, pool.free

    def check_integrity(self, live: Sequence[SequenceKV]) -> None:
        """AssertionError unless free + cached + referenced = total in every pool, reference counts equal
        the holds of `live` and the pins, and tree and pools agree."""
        check(self.pools, self.tree, live)

    def _allocate(self, group: int, n: int) -> I32:
        pool = self.pools[group]
        if pool.free < n:
            self.tree.evict(group, n)
        return pool.allocate(n)

    def _take(self, group: int) -> int:
        pool = self.pools[group]
        if not pool.free:
            self.tree.evict(group, 1)
        return pool.take()

    def _hold(self, kv: SequenceKV, match: Match, blocks: int) -> list[I32]:
        # Reference what is there of the first `blocks` blocks; absent entries of the tables stay 0.
        held: list[I32] = []
        for g, pool in enumerate(self.pools):
            start = kv.first[g] if g in self.paged else max(0, blocks - 1)
            row = np.zeros(blocks - start if blocks else 0, np.int32)
            for node, n in match.path:
                lo, hi = max(start, node.start), min(node.start + n, blocks)
                if lo < hi:
                    row[lo - start : hi - start] = node.blocks[g, lo - node.start : hi - node.start]
            np.maximum(row, 0, out=row)
            if g in self.paged:
                kv.blocks[g, start:blocks] = row
            elif blocks:
                kv.sources[g] = int(row[0])
            ids = row[row > 0]
            pool.ref(ids)
            held.append(ids)
        return held

    def _lacks(self, kv: SequenceKV, group: int) -> Index:
        # Chain indices that must come from a store.
        if group in self.states:
            return np.arange(kv.count - 1, kv.count) if kv.count and not kv.sources[group] else np.arange(0)
        first = kv.first[group]
        return np.flatnonzero(kv.blocks[group, first : kv.count] == 0) + first

    def _place(self, kv: SequenceKV) -> tuple[Node, int]:
        # Where its committed path ends. Without anchored groups nothing keeps that path alive: start over.
        if self.tree.anchors and kv.committed:
            return self.tree.locate(kv.node, kv.committed), kv.committed
        return self.tree.root, 0

    def _share(self, kv: SequenceKV, hashes: bytes, stop: int) -> None:
        anchors = self.tree.anchors
        for node, lo, hi, new in self.tree.insert(*self._place(kv), hashes, stop):
            base = node.start
            for g in self.paged:
                mine = kv.blocks[g, base + lo : base + hi]
                if new and g in anchors:
                    self.tree.install(g, node, lo, mine.copy())
                    continue
                there = node.blocks[g, lo:hi]
                empty = (there < 0) & (mine > 0)
                for a, b in runs(empty.nonzero()[0]):
                    self.tree.install(g, node, lo + a, mine[a:b].copy())
                if g in anchors:
                    twins = there[there != mine]
                    if len(twins):
                        self.pools[g].ref(twins)
                        kv.shadows.append((g, twins))
            kv.node = node
        self.tree.prune(kv.node)

    def _settle_sources(self, kv: SequenceKV, hashes: bytes, tokens: int) -> None:
        # Loaded snapshots become shared once the engine says that their position is there; all are let go
        # when a step beyond it has ended, as that step began by restoring them.
        while kv.loads:
            self._share_state(kv, *kv.loads.popitem(), hashes, kv.attached)
        if tokens > kv.attached * self.block_tokens:
            for g in self.states:
                if kv.sources[g]:
                    self.pools[g].drop(kv.sources[g])
                    kv.sources[g] = 0

    def _share_state(self, kv: SequenceKV, group: int, block: int, hashes: bytes, depth: int) -> None:
        if self.tree.anchors:
            node = self.tree.locate(kv.node, depth)
        else:
            node = self.tree.insert(self.tree.root, 0, hashes, depth)[-1][0]
        index = depth - 1 - node.start
        if node.blocks[group, index] < 0:
            self.tree.install(group, node, index, np.array([block], np.int32))
        self.tree.prune(node)

    def _set_slide(self, kv: SequenceKV) -> None:
        if self.windows:
            bt = self.block_tokens
            kv.slides_at = min((kv.first[g] + 1) * bt + self.groups[g].window for g in self.windows)


def _check_sizes(
    groups: tuple[KVGroup, ...], blocks: tuple[int, ...], block_tokens: int, max_sequences: int
) -> None:
    if not groups or len(blocks) != len(groups):
        raise DeploymentError(f"{len(blocks)} pool sizes for {len(groups)} KV groups; valid: one for each")
    for group, n in zip(groups, blocks, strict=True):
        if group.block_tokens != block_tokens:
            raise DeploymentError(
                f"KV group {group.name!r} has blocks of {group.block_tokens} tokens; valid: {block_tokens}, "
                "the block size of the deployment, for every group"
            )
        least = max_sequences if group.kind is GroupKind.STATE else 1
        if n < least:
            raise DeploymentError(
                f"KV group {group.name!r} has a pool of {n} blocks; valid: at least {least}"
                + (", one live state per sequence" if group.kind is GroupKind.STATE else "")
            )
