from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.errors import UserError
from bien.core.request import BlockRuns
from bien.traces.model import Session, Stream, Turn
from bien.traces.scale import scale_content, scale_exponent, scale_session, scaled_length
from tests.traces.test_prefix import shared

contents = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=8).map(BlockRuns.of)
exponents = st.integers(0, 6)


@given(contents, contents, contents, exponents)
def test_shared_prefixes_shrink_by_cumulative_rounding(
    head: BlockRuns, a: BlockRuns, b: BlockRuns, k: int
) -> None:
    one, two = head.join(a), head.join(b)
    n = shared(one, two)
    assert shared(scale_content(one, k), scale_content(two, k)) == scaled_length(n, k)


@given(contents, exponents)
def test_length_is_rounded(content: BlockRuns, k: int) -> None:
    assert len(scale_content(content, k)) == scaled_length(len(content), k)


@given(contents, st.integers(1, 6))
def test_windows_of_one_run_stay_one_run(content: BlockRuns, k: int) -> None:
    runs = len(content.packed) // 16
    assert len(scale_content(content, k).packed) // 16 <= 2 * runs


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 90)), min_size=1, max_size=6), exponents)
def test_every_turn_keeps_a_token_and_outputs_stay_derived(sizes: list[tuple[int, int]], k: int) -> None:
    turns: list[Turn] = []
    at = 0
    for grow, out in sizes:
        prompt = BlockRuns.of([(0, at + grow)])
        turns.append(Turn(prompt, BlockRuns.of([(at + grow, out)]), derived=out))
        at += grow + out
    scaled = scale_session(Session("s", [Stream(0, turns)]), k).streams[0].turns
    for before, turn in zip(turns, scaled, strict=True):
        assert turn.input_tokens == max(1, scaled_length(before.input_tokens, k))
        assert turn.output_tokens >= 1
        assert turn.derived <= turn.output_tokens
    for turn, following in pairwise(scaled):
        if scaled_length(turn.input_tokens, k):
            known = turn.input_tokens + turn.derived
            assert shared(turn.input.join(turn.output), following.input) >= min(known, following.input_tokens)


@pytest.mark.parametrize("factor", [0, -1, 0.3, 2, 1 / (1 << 17), 0.75])
def test_other_factors_are_refused(factor: float) -> None:
    with pytest.raises(UserError, match="valid: 1, 1/2, 1/4"):
        scale_exponent(factor)


def test_powers_of_two_are_taken() -> None:
    assert [scale_exponent(f) for f in (1, 0.5, 1 / 32)] == [0, 1, 5]
