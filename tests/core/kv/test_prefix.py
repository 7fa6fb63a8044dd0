from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.kv.prefix import groups_from, usable_blocks, usable_from_counts, window_start

BT = 4


def group(kind: GroupKind, window: int = 0) -> KVGroup:
    return KVGroup("g", kind, (0,), BT, window=window)


def bools(text: str) -> np.ndarray:
    return np.array([c == "1" for c in text], np.bool_)


def oracle(groups, present) -> int:
    """Tries every position, longest first, asking for each token position that a group needs."""

    def has(have, i):
        return i < len(have) and have[i]

    def holds(g, have, p):
        if g.kind is GroupKind.STATE:
            return p == 0 or has(have, p - 1)
        first = 0
        if g.kind is GroupKind.WINDOW and g.window:
            first = max(0, p * BT - g.window)
        return all(has(have, t // BT) for t in range(first, p * BT))

    longest = max(map(len, present), default=0)
    return next(
        p
        for p in range(longest, -1, -1)
        if all(holds(g, h, p) and p <= len(h) for g, h in zip(groups, present, strict=True))
    )


kinds = st.sampled_from(list(GroupKind))
rows = st.lists(st.sampled_from([True, True, True, False]), max_size=12).map(lambda x: np.array(x, np.bool_))
parts = st.lists(st.tuples(kinds, st.integers(0, 17), rows), min_size=1, max_size=4)


@given(parts)
def test_against_the_oracle(parts):
    groups = [group(kind, window) for kind, window, _ in parts]
    present = [row for _, _, row in parts]
    assert usable_blocks(groups, present) == oracle(groups, present)


@given(parts, st.integers(0, 12))
def test_counts_and_sets_mean_the_same(parts, blocks):
    groups = [group(kind, window) for kind, window, _ in parts]
    rows = [np.resize(row, blocks) if len(row) else np.zeros(blocks, np.bool_) for _, _, row in parts]
    sets = [{int(i) for i in np.flatnonzero(row)} | {blocks + 1, -1} for row in rows]
    expected = usable_blocks(groups, rows)
    assert usable_from_counts(groups, sets, blocks) == expected
    assert usable_from_counts(groups, rows, blocks) == expected


@pytest.mark.parametrize(
    ("kinds", "present", "usable"),
    [
        ([("full", 0)], ["1101"], 2),
        ([("full", 0)], [""], 0),
        ([("window", 6)], ["0011"], 4),  # 16 tokens: 10..15 are in blocks 2 and 3
        ([("window", 8)], ["0011"], 4),
        ([("window", 9)], ["0011"], 0),  # 7 is in block 1; and no shorter position holds
        ([("window", 0)], ["1101"], 2),  # an unbounded window needs everything
        ([("state", 0)], ["0010"], 3),
        ([("full", 0), ("state", 0)], ["1100", "1011"], 1),
        ([("full", 0), ("window", 4), ("state", 0)], ["11110", "01110", "01010"], 4),
        ([("full", 0), ("window", 4), ("state", 0)], ["11110", "01100", "01010"], 2),
        ([("compressed", 0), ("draft", 0)], ["111", "110"], 2),
    ],
)
def test_examples(kinds, present, usable):
    groups = groups_from([k for k, _ in kinds], [w for _, w in kinds], BT)
    assert usable_blocks(groups, [bools(p) for p in present]) == usable


def test_a_count_is_a_prefix():
    groups = groups_from(("full", "window", "state"), (0, 5, 0), BT)
    assert usable_from_counts(groups, [5, 4, {1, 3}], 9) == 4
    assert usable_from_counts(groups, [3, 4, {1, 3}], 9) == 2
    assert usable_from_counts(groups, [0, 9, {1, 3}], 9) == 0


def test_window_start_is_the_block_of_the_oldest_position_in_the_window():
    window = group(GroupKind.WINDOW, 6)
    assert [window_start(window, t) for t in (0, 6, 9, 10, 13, 14)] == [0, 0, 0, 1, 1, 2]
    assert window_start(group(GroupKind.FULL), 1000) == 0
