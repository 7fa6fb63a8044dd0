"""The invariants of pools, tree and sequences, checked the slow way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.pool import BlockPool
from bien.core.kv.table import SequenceKV
from bien.core.kv.tree import TAILS, PrefixTree


def check(pools: list[BlockPool], tree: PrefixTree, live: Sequence[SequenceKV]) -> None:
    """AssertionError names the group and what disagrees."""
    _check_tree(tree)
    for g, pool in enumerate(pools):
        _check_pool(g, pool, live)
        in_tree = np.concatenate(
            [np.zeros(0, np.int32)] + [node.blocks[g, : node.size] for node in tree.nodes()]
        )
        in_tree = np.sort(in_tree[in_tree >= 0])
        assert len(np.unique(in_tree)) == len(in_tree), f"group {g}: a block is cached twice"
        cached = np.flatnonzero(pool.cached)
        assert np.array_equal(in_tree, cached), f"group {g}: tree has {in_tree}, pool {cached}"


def _check_pool(g: int, pool: BlockPool, live: Sequence[SequenceKV]) -> None:
    free = pool.free_blocks()
    total = f"group {g}: referenced {pool.referenced} + cached {pool.idle} + free {pool.free}"
    assert len(np.unique(free)) == len(free), f"group {g}: a block is free twice"
    assert not pool.refs[free].any(), f"group {g}: a free block is referenced"
    assert not pool.cached[free].any(), f"group {g}: a free block is cached"
    assert not (pool.refs[0] or pool.cached[0]) and 0 not in free, f"group {g}: the null block is in use"
    referenced = int(np.count_nonzero(pool.refs))
    idle = int(np.count_nonzero(pool.cached & (pool.refs == 0)))
    assert referenced + idle + len(free) == pool.size, f"{total} != {pool.size}: blocks are lost"
    assert (referenced, idle) == (pool.referenced, pool.idle), f"{total}: counted {referenced}, {idle}"
    holds = pool.pins.copy()
    for kv in live:
        assert not kv.released, "a released sequence is live"
        np.add.at(holds, np.array(kv.held(g), np.int32), 1)
    wrong = np.flatnonzero(holds != pool.refs)
    assert not len(wrong), f"group {g}: blocks {wrong}: references {pool.refs[wrong]}, holds {holds[wrong]}"


def _check_tree(tree: PrefixTree) -> None:
    assert tree.root.size == 0 and tree.root.parent is None
    for key, child in tree.root.children.items():
        assert child.parent is tree.root and child.key == key and child.start == 0
    for node in tree.nodes():
        assert node.size > 0 and len(node.hashes) == node.size * HASH_BYTES, "a node's run is damaged"
        assert node.slice(0, 1) == node.key and node.blocks.shape[1] >= node.size
        for key, child in node.children.items():
            assert child.parent is node and child.key == key and child.start == node.end
        if not node.children:
            assert node.entry[TAILS] is not None, "a leaf that eviction cannot find"
            assert (node.blocks[:, node.size - 1] >= 0).any(), "a leaf ends with nothing"
        for g, lane in tree.lanes.items():
            queued = node.entry[lane.lane] is not None
            assert queued or not (node.blocks[g, : node.size] >= 0).any(), f"group {g}: entries not queued"
        for g in tree.anchors:
            ids = node.blocks[g, : node.size]
            assert (ids >= 0).all(), f"group {g}: a hole in an anchored group"
            pool = tree.pools[g]
            held = (pool.refs - pool.pins)[ids] > 0
            below = any(((pool.refs - pool.pins)[c.blocks[g, :1]] > 0).any() for c in node.children.values())
            assert not below or held.all(), f"group {g}: a held block below an idle one"
            assert not np.any(np.diff(held.astype(np.int8)) > 0), f"group {g}: a held block below an idle one"
