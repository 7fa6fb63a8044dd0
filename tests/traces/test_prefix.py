from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bien.core.request import BlockRuns
from bien.traces.materialize import virtual_ids
from bien.traces.prefix import PrefixTree

contents = st.lists(
    st.tuples(st.integers(0, 6).map(lambda x: x * 3), st.integers(1, 7)), min_size=1, max_size=5
).map(BlockRuns.of)


def shared(a: BlockRuns, b: BlockRuns) -> int:
    """The slow oracle: token by token."""
    n = 0
    for x, y in zip(virtual_ids(a), virtual_ids(b), strict=False):
        if x != y:
            break
        n += 1
    return n


@given(st.lists(contents, max_size=12), contents)
def test_match_is_the_longest_prefix_of_all_inserted(known: list[BlockRuns], prompt: BlockRuns) -> None:
    tree = PrefixTree()
    for content in known:
        tree.insert(content)
    assert tree.match(prompt) == max((shared(k, prompt) for k in known), default=0)


@given(st.lists(st.tuples(contents, st.integers(0, 9)), max_size=12), contents, st.integers(0, 9))
def test_match_sees_only_what_was_there_in_time(
    known: list[tuple[BlockRuns, int]], prompt: BlockRuns, now: int
) -> None:
    tree = PrefixTree()
    for content, time in known:
        tree.insert(content, time)
    assert tree.match(prompt, now) == max((shared(k, prompt) for k, t in known if t <= now), default=0)
