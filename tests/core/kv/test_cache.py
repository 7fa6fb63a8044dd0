"""What KVCache promises, example by example. Random lives are in test_cache_model.py."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bien.core.errors import DeploymentError
from bien.core.kv.cache import KVCache, SequenceKV
from tests.core.kv.chains import BT, DRAFT, FULL, STATE, WINDOW, chain, split


def cache_of(*groups, blocks=16, sequences=4) -> KVCache:
    return KVCache(groups, (blocks,) * len(groups), BT, sequences)


def run(cache: KVCache, words, tokens=None, *, snapshots=()) -> SequenceKV:
    """A sequence that computes `words` blocks (or `tokens` tokens of them) in one step."""
    hashes = chain(words)
    match = cache.match(hashes)
    opened = cache.attach(hashes, match, match.blocks)
    assert opened is not None and opened[1] == []
    kv = opened[0]
    tokens = len(words) * BT if tokens is None else tokens
    assert cache.reserve(kv, tokens)
    cache.commit(kv, hashes, tokens)
    for g, at in snapshots:
        cache.keep_snapshot(kv, g, hashes, at * BT, cache.snapshot_block(kv, g))
    return kv


def past(cache: KVCache, words, **kw) -> None:
    cache.release(run(cache, words, **kw))


def events(cache: KVCache) -> list[tuple]:
    return [(e.op, e.group, e.parent, split(e.hashes)) for e in cache.take_events()]


def test_a_finished_sequence_is_found_again_down_to_the_block():
    cache = cache_of(FULL)
    past(cache, [1, 2, 3, 4], tokens=4 * BT - 1)  # the last block is not full
    assert cache.match(chain([1, 2, 3, 4])).blocks == 3
    assert cache.match(chain([1, 2, 9])).blocks == 2
    assert cache.match(chain([9])).blocks == 0
    assert cache.match(b"").blocks == 0
    assert cache.usage(0) == (0, 3, 13)


def test_events_tell_runs_with_their_parents():
    cache = cache_of(FULL)
    past(cache, [1, 2, 3])
    h = split(chain([1, 2, 3]))
    assert events(cache) == [("stored", 0, b"", h)]
    past(cache, [1, 2, 7, 8])
    k = split(chain([1, 2, 7, 8]))
    assert events(cache) == [("stored", 0, k[1], k[2:])]
    assert events(cache) == []
    told = [(e.op, e.parent, split(e.hashes)) for e in cache.snapshot()]
    assert told[0] == ("stored", b"", h[:2])
    assert sorted(told[1:]) == sorted([("stored", h[1], h[2:]), ("stored", h[1], k[2:])])


def test_leaves_lose_just_the_tail_that_is_needed_least_recent_first():
    cache = cache_of(FULL, blocks=9)
    past(cache, [1, 2, 3, 4])
    past(cache, [5, 6, 7, 8])
    events(cache)
    kv = run(cache, [9, 10, 11])  # needs 3, has 1 free
    h = split(chain([1, 2, 3, 4]))
    assert events(cache) == [("removed", 0, b"", h[2:]), ("stored", 0, b"", split(chain([9, 10, 11])))]
    assert cache.match(chain([1, 2, 3, 4])).blocks == 2
    assert cache.match(chain([5, 6, 7, 8])).blocks == 4
    cache.check_integrity([kv])


def test_attach_renews_a_path():
    cache = cache_of(FULL, blocks=9)
    past(cache, [1, 2, 3, 4])
    past(cache, [5, 6, 7, 8])
    past(cache, [1, 2, 3, 4])
    past(cache, [9, 10, 11])
    assert cache.match(chain([1, 2, 3, 4])).blocks == 4
    assert cache.match(chain([5, 6, 7, 8])).blocks == 2


def test_an_emptied_leaf_makes_its_parent_a_leaf():
    cache = cache_of(FULL, blocks=6)
    past(cache, [1, 2, 3])
    past(cache, [1, 2, 4])
    kv = run(cache, [7, 8, 9, 10, 11, 12])
    assert cache.match(chain([1, 2])).blocks == 0
    cache.check_integrity([kv])
    assert not cache.reserve(kv, 7 * BT)


def test_a_twin_stays_private_and_keeps_the_path_above_what_it_commits():
    cache = cache_of(FULL, blocks=10)
    hashes = chain([1, 2, 3])
    first, second = (cache.attach(hashes, cache.match(hashes), 0)[0] for _ in range(2))
    for kv in (first, second):
        assert cache.reserve(kv, 2 * BT)
        cache.commit(kv, hashes, 2 * BT)
    assert len(events(cache)) == 1  # stored once
    cache.release(first)
    assert cache.usage(0) == (4, 0, 6)  # the twins' path is still referred to
    assert cache.reserve(second, 3 * BT)
    cache.commit(second, hashes, 3 * BT)
    assert events(cache) == [("stored", 0, hashes[16:32], [hashes[32:]])]
    cache.check_integrity([second])
    cache.release(second)
    assert cache.usage(0) == (0, 3, 7)  # the private twins are free
    assert cache.match(hashes).blocks == 3
    cache.check_integrity([])


def test_blocks_whose_twin_was_evicted_become_the_shared_ones():
    cache = cache_of(FULL, blocks=4)
    hashes = chain([1, 2])
    kv = cache.attach(hashes, cache.match(hashes), 0)[0]
    assert cache.reserve(kv, 2 * BT)
    past(cache, [1, 2])  # another one was faster
    assert cache.usage(0) == (2, 2, 0)
    past(cache, [5, 6])  # and is evicted
    assert cache.match(hashes).blocks == 0
    cache.commit(kv, hashes, 2 * BT)
    cache.release(kv)
    assert cache.match(hashes).blocks == 2
    cache.check_integrity([])


def test_a_sequence_survives_splits_and_evictions_below_its_path():
    cache = cache_of(FULL, blocks=12)
    past(cache, [1, 2, 3, 4])
    hashes = chain([1, 2, 8, 9])
    kv = cache.attach(hashes, cache.match(hashes), 2)[0]  # ends inside the node
    past(cache, [1, 2, 3, 7])  # splits it below the sequence's end
    past(cache, [1, 5])  # splits it above
    cache.tree.evict(0, 10)  # evicts all but what the sequence holds, the node it came from included
    assert cache.usage(0) == (2, 0, 10)
    assert cache.reserve(kv, 4 * BT)
    cache.commit(kv, hashes, 4 * BT)
    cache.check_integrity([kv])
    cache.release(kv)
    assert cache.match(hashes).blocks == 4


def test_an_outdated_match_is_made_again():
    cache = cache_of(FULL, blocks=4)
    past(cache, [1, 2])
    hashes = chain([1, 2])
    match = cache.match(hashes)
    past(cache, [5, 6, 7])  # evicts block 2
    kv, missing = cache.attach(hashes, match, match.blocks)
    assert [(m.group, m.hashes, len(m.blocks)) for m in missing] == [(0, hashes[16:], 1)]
    cache.check_integrity([kv])


def test_a_match_does_not_mistake_what_took_its_place():
    cache = cache_of(FULL, blocks=5)
    past(cache, [1, 2])
    hashes = chain([1, 2])
    match = cache.match(hashes)
    cache.tree.evict(0, 4)
    past(cache, [1, 9])  # in the same node, where 2 was
    kv, missing = cache.attach(hashes, match, 2)
    assert [m.hashes for m in missing] == [hashes[16:]]
    match = cache.match(chain([1, 9]))
    past(cache, [1, 8])  # splits the node
    other, missing = cache.attach(chain([1, 9]), match, 2)
    assert missing == [] and other.table(0)[0] == kv.table(0)[0]
    cache.check_integrity([kv, other])


def test_window_blocks_in_use_are_not_evicted():
    cache = KVCache((FULL, WINDOW), (20, 8), BT, 4)
    kv = run(cache, [1, 2, 3, 4])
    cache.slide(kv, 16)  # 10..15: blocks 2 and 3 are in use, 0 and 1 idle
    past(cache, [5, 6, 7, 8])
    cache.tree.evict(1, 4)
    h = split(chain([1, 2, 3, 4]))
    names = [n for e in cache.take_events() if e.op == "removed" for n in split(e.hashes)]
    assert not set(names) & set(h[2:]) and len(names) == 4
    cache.tree.evict(1, 6)
    assert cache.match(chain([1, 2, 3, 4])).present[1].tolist() == [False, False, True, True]
    cache.check_integrity([kv])


def test_reserve_is_all_or_nothing_over_groups():
    cache = KVCache((FULL, DRAFT), (8, 3), BT, 1)
    kv = cache.attach(b"", cache.match(b""), 0)[0]
    assert not cache.reserve(kv, 4 * BT)
    assert cache.usage(0) == (0, 0, 8) and cache.usage(1) == (0, 0, 3)
    assert cache.reserve(kv, 3 * BT)
    assert [len(kv.take_updates(g)) for g in (0, 1)] == [3, 3]
    assert [kv.take_updates(g) for g in (0, 1)] == [[], []]
    assert cache.reserve(kv, 2 * BT) and kv.take_updates(0) == []


def test_attach_reserves_what_a_store_will_load_and_commit_shares_it():
    cache = cache_of(FULL, STATE)
    hashes = chain([1, 2, 3])
    past(cache, [1], snapshots=[(1, 1)])
    events(cache)
    match = cache.match(hashes)
    assert match.blocks == 1
    kv, missing = cache.attach(hashes, match, 3)
    assert [(m.group, m.hashes) for m in missing] == [(0, hashes[16:]), (1, hashes[32:])]
    source, live = cache.restore(kv, 1)
    assert missing[1].blocks == [source] and source != live
    assert kv.table(0).tolist()[1:] == missing[0].blocks
    cache.commit(kv, hashes, 3 * BT)
    assert events(cache) == [
        ("stored", 0, hashes[:16], split(hashes)[1:]),
        ("stored", 1, hashes[16:32], split(hashes)[2:]),
    ]
    assert cache.pools[1].refs[source] == 1  # until the step that restores it has ended
    assert cache.reserve(kv, 3 * BT + 1)
    cache.commit(kv, hashes, 3 * BT + 1)
    assert cache.pools[1].refs[source] == 0
    cache.check_integrity([kv])


def test_attach_beyond_memory_changes_nothing():
    cache = cache_of(FULL, blocks=6)
    past(cache, [1, 2])
    kv = run(cache, [5, 6, 7])
    hashes = chain([1, 2, 3, 4])
    usage = cache.usage(0)
    assert cache.attach(hashes, cache.match(hashes), 4) is None
    assert cache.usage(0) == usage
    cache.check_integrity([kv])
    with pytest.raises(ValueError, match=r"blocks=5 is beyond the chain of 4"):
        cache.attach(hashes, cache.match(hashes), 5)


def test_a_window_lets_go_behind_it_and_only_there():
    cache = cache_of(FULL, WINDOW)
    kv = run(cache, [1, 2, 3])
    kv.take_updates(1)
    cache.slide(kv, 9)  # 3..8 are in the window
    assert kv.take_updates(1) == []
    cache.slide(kv, 10)
    assert kv.take_updates(1) == [(0, 0)]
    assert cache.usage(1) == (2, 1, 13)
    assert cache.match(chain([1])).blocks == 1  # the block that was let go is still cached
    cache.slide(kv, 10)
    assert kv.take_updates(1) == []
    cache.release(kv)
    kv2 = run(cache, [1, 2, 3])
    assert kv2.table(1).tolist()[0] == 0 and kv2.first[1] == 1
    cache.check_integrity([kv2])


def test_windows_are_evicted_apart_from_the_rest_and_a_running_twin_fills_the_hole():
    cache = KVCache((FULL, WINDOW), (16, 4), BT, 4)
    hashes = chain([1, 2, 3])
    past(cache, [1, 2])
    cache.take_events()
    past(cache, [5, 6, 7, 8], tokens=0)
    cache.tree.evict(1, 4)
    assert events(cache) == [("removed", 1, b"", split(hashes)[:2])]
    assert cache.match(hashes).blocks == 0 and cache.match(hashes).present[0].tolist() == [1, 1, 0]
    kv = cache.attach(hashes, cache.match(hashes), 0)[0]
    assert cache.reserve(kv, 2 * BT)
    cache.commit(kv, hashes, 2 * BT)
    assert events(cache) == [("stored", 1, b"", split(hashes)[:2])]
    assert cache.match(hashes).blocks == 2
    cache.check_integrity([kv])


def test_snapshots_behind_the_deepest_go_first_then_by_recency():
    cache = KVCache((FULL, STATE), (30, 5), BT, 1)
    past(cache, [1, 2, 3], snapshots=[(1, 1), (1, 3)])
    past(cache, [5, 6, 7], snapshots=[(1, 2), (1, 3)])
    events(cache)
    one, two = split(chain([1, 2, 3])), split(chain([5, 6, 7]))
    gone = []
    for free in (2, 3, 4, 5):
        cache.tree.evict(1, free)
        gone += [e.hashes for e in cache.take_events()]
    assert gone == [one[0], two[1], one[2], two[2]]


def test_snapshots_are_kept_dropped_or_forgotten():
    cache = cache_of(FULL, STATE, sequences=1)
    hashes = chain([1, 2, 3])
    kv = run(cache, [1, 2, 3])
    block, twin, unused = (cache.snapshot_block(kv, 1) for _ in range(3))
    assert len({block, twin, unused, 0}) == 4
    assert cache.match(hashes).blocks == 0
    cache.keep_snapshot(kv, 1, hashes, 2 * BT, block)
    assert cache.match(hashes).blocks == 2
    cache.keep_snapshot(kv, 1, hashes, 2 * BT, twin)  # one is there: this one is freed
    cache.drop_snapshot(kv, 1, unused)
    cache.drop_snapshot(kv, 1, unused)
    assert cache.usage(1) == (1, 1, 14)
    with pytest.raises(ValueError, match="no snapshot at 9 tokens"):
        cache.keep_snapshot(kv, 1, hashes, 9, block)
    with pytest.raises(ValueError, match="3 blocks are committed"):
        cache.keep_snapshot(kv, 1, chain([1, 2, 3, 4]), 4 * BT, block)
    assert cache.forget_snapshot(1, hashes, 2 * BT)
    assert not cache.forget_snapshot(1, hashes, 2 * BT)
    assert cache.match(hashes).blocks == 0
    cache.check_integrity([kv])


def test_no_snapshot_block_when_all_are_in_use():
    cache = KVCache((FULL, STATE), (8, 2), BT, 1)
    kv = run(cache, [1])
    assert cache.snapshot_block(kv, 1) > 0
    assert cache.snapshot_block(kv, 1) == 0


def test_committed_runs_are_offered_while_they_hold():
    cache = cache_of(FULL, blocks=4)
    past(cache, [1, 2, 3])
    past(cache, [4, 5])  # evicts block 3 and reuses its memory
    offered = {}
    for _, hashes, blocks in cache.take_committed():
        offered.update(zip(split(hashes), blocks, strict=True))
    assert sorted(offered) == sorted(split(chain([1, 2]) + chain([4, 5])))
    assert len(set(offered.values())) == 4
    assert cache.take_committed() == []


def test_what_nobody_takes_does_not_pile_up():
    cache = cache_of(FULL, blocks=4)
    for i in range(200):
        past(cache, [i, i])
    assert len(cache.log._committed) <= 8
    assert len(cache.take_committed()) == 2


def test_a_pinned_block_outlives_its_eviction():
    cache = cache_of(FULL, blocks=4)
    past(cache, [1, 2])
    ((_, _, blocks),) = cache.take_committed()
    cache.pin(0, blocks[1:])
    assert cache.available(0) == 3
    cache.tree.evict(0, 3)  # block 1 lies above the pinned one, and can be had
    assert cache.match(chain([1, 2])).blocks == 0
    assert cache.usage(0) == (1, 0, 3)
    cache.unpin(0, blocks[1:])
    assert cache.usage(0) == (0, 0, 4)
    cache.check_integrity([])


def test_update_arrays_say_what_updates_say():
    cache = cache_of(FULL, WINDOW, STATE)
    kv = run(cache, [1, 2, 3], snapshots=[(2, 3)])
    other = run(cache, [1, 2, 3])
    for g in range(3):
        index, blocks = other.take_update_arrays(g)
        expected = (
            [(i, b) for i, b in enumerate(other.table(g).tolist()) if b] if g < 2 else [(0, other.live[2])]
        )
        assert list(zip(index.tolist(), blocks.tolist(), strict=True)) == expected
        assert len(other.take_update_arrays(g)[0]) == 0
    kv.take_updates(1)
    cache.slide(kv, 14)
    assert [a.tolist() for a in kv.take_update_arrays(1)] == [[0, 1], [0, 0]]


def test_sizes_are_checked():
    odd = msgspec.structs.replace(WINDOW, block_tokens=8)
    with pytest.raises(DeploymentError, match=r"'window' has blocks of 8 tokens; valid: 4"):
        KVCache((FULL, odd), (8, 8), BT, 1)
    with pytest.raises(DeploymentError, match=r"'state' has a pool of 3 blocks; valid: at least 4, one live"):
        KVCache((FULL, STATE), (8, 3), BT, 4)
    with pytest.raises(DeploymentError, match="1 pool sizes for 2 KV groups"):
        KVCache((FULL, STATE), (8,), BT, 4)
    with pytest.raises(DeploymentError, match="'full' has a pool of 0 blocks"):
        KVCache((FULL,), (0,), BT, 4)


@pytest.mark.parametrize("damage", ["refs", "cached", "hash", "free", "idle"])
def test_integrity_notices_damage(damage):
    cache = cache_of(FULL)
    past(cache, [1, 2])
    kv = run(cache, [1, 2, 3])
    cache.check_integrity([kv])
    pool, node = cache.pools[0], next(cache.tree.nodes())
    if damage == "refs":
        pool.refs[node.blocks[0, 1]] += 1
    elif damage == "cached":
        pool.cached[node.blocks[0, 0]] = False
    elif damage == "hash":
        node.hashes[:1] = b"?"
    elif damage == "free":
        pool.free -= 1
    else:
        pool.idle += 1
    with pytest.raises(AssertionError):
        cache.check_integrity([kv])


def test_integrity_notices_a_forgotten_sequence():
    cache = cache_of(FULL)
    run(cache, [1, 2])
    with pytest.raises(AssertionError, match="references"):
        cache.check_integrity([])


def test_long_prompts_match_across_nodes_of_every_size():
    cache = cache_of(FULL, blocks=400)
    words = list(range(300))
    for cut in (3, 40, 41, 170, 299):
        past(cache, [*words[:cut], 1000])
    past(cache, words)
    for cut in (0, 1, 2, 3, 39, 40, 41, 100, 170, 171, 299, 300):
        assert cache.match(chain([*words[:cut], 2000])).blocks == cut
        assert cache.match(chain(words[:cut])).blocks == cut
    assert np.array_equal(cache.match(chain([*words, 7])).present[0], np.arange(301) < 300)
    cache.check_integrity([])
