"""`usable_blocks`: how much of a chain is usable when every KV group has its own holes.

Pure and shared: the cache, the index of a gateway and a router must agree on it to the block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from bien.core.kv.groups import GroupKind, KVGroup

Bools = NDArray[np.bool_]


def anchored(group: KVGroup) -> bool:
    """Whether it needs every block of a prefix (all kinds but WINDOW and STATE)."""
    return group.kind is not GroupKind.WINDOW and group.kind is not GroupKind.STATE


def window_start(group: KVGroup, tokens: int) -> int:
    """The first block that a WINDOW group needs when the next position is `tokens`; 0 for other kinds."""
    if group.kind is not GroupKind.WINDOW or not group.window:
        return 0
    return max(0, tokens - group.window) // group.block_tokens


def usable_blocks(groups: Sequence[KVGroup], present: Sequence[Bools]) -> int:
    """The longest position, in blocks, at which every group holds.

    present[g][i]: group g has the block that ends the chain's i-th block. At position p a group with all
    positions needs blocks 0..p-1, a WINDOW group those that cover the last `window` positions before it,
    a STATE group a snapshot at exactly that position, stored under block p-1. Position 0 (nothing cached,
    zero state) always holds. Arrays of unequal length count as absent beyond their ends.
    """
    limit = min((len(p) for p in present), default=0)
    for group, have in zip(groups, present, strict=True):
        if anchored(group):
            limit = leading(have[:limit])
    ok: Bools | None = None
    for group, have in zip(groups, present, strict=True):
        if limit and not anchored(group):
            holds = _holds(group, have[:limit])
            ok = holds if ok is None else ok & holds
    if ok is None:
        return limit
    return int(np.flatnonzero(ok)[-1])


def usable_from_counts(
    groups: Sequence[KVGroup], have: Sequence[int | Collection[int] | Bools], blocks: int
) -> int:
    """`usable_blocks` of a chain of `blocks` blocks from looser forms per group: a count (that many from
    the start), a collection of block indices, or an array as above."""
    present: list[Bools] = []
    for entry in have:
        if isinstance(entry, np.ndarray):
            row = np.zeros(blocks, np.bool_)
            row[: len(entry)] = entry[:blocks]
        else:
            row = np.zeros(blocks, np.bool_)
            if isinstance(entry, int):
                row[:entry] = True
            else:
                row[[i for i in entry if 0 <= i < blocks]] = True
        present.append(row)
    return usable_blocks(groups, present)


def groups_from(kinds: Sequence[str], windows: Sequence[int], block_tokens: int) -> tuple[KVGroup, ...]:
    """Groups from what a worker's hello says of them: enough for `usable_blocks`, no more."""
    return tuple(
        KVGroup(name=f"{kind}.{i}", kind=GroupKind(kind), layers=(), block_tokens=block_tokens, window=window)
        for i, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    )


def leading(have: Bools) -> int:
    """How many entries from the start are set."""
    n = len(have)
    if not n:
        return 0
    at = int(have.argmin())
    return n if have[at] else at


def _holds(group: KVGroup, have: Bools) -> Bools:
    # Entry p of n + 1: does the group hold at position p (in blocks)?
    n = len(have)
    ok = np.ones(n + 1, np.bool_)
    if group.kind is GroupKind.STATE:
        ok[1:] = have
        return ok
    absent = np.zeros(n + 1, np.int32)
    np.cumsum(~have, out=absent[1:])
    at = np.arange(n + 1)
    if group.window:
        starts = np.maximum(0, at * group.block_tokens - group.window) // group.block_tokens
    else:
        starts = np.zeros(n + 1, np.intp)
    return np.asarray(absent == absent[starts])
