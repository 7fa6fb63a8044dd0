"""Probes reach every size that an engine takes, and ask for no more than it holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.errors import UserError
from bien.replay.calibrate.probes import Batch, Reach, batches, sessions


@settings(max_examples=40)
@given(
    st.integers(1, 100), st.integers(300, 100_000), st.integers(500, 1_000_000), st.integers(2_000, 1_000_000)
)
def test_no_batch_exceeds_the_engine(rows: int, context: int, cache: int, tokens: int) -> None:
    reach = Reach(rows, context, cache, tokens)
    found = batches(reach)
    assert found and max(b.sessions for b in found) <= rows and found[0].sessions == 1
    for batch in found:
        held = 0
        for session in sessions(batch, 3):
            assert session.longest <= context
            held += session.longest
        assert held <= cache


def test_every_size_is_there_and_the_budget_holds() -> None:
    found = batches(Reach(16, 8192, 65536, 40_000))
    assert {b.sessions for b in found} == {*range(1, 9), 12, 16}
    assert max(b.prompt for b in found) > 4000
    assert sum(b.sessions * b.prompt for b in found) <= 40_000


def test_sessions_grow_and_share_a_third_of_their_first_prompts() -> None:
    some = list(sessions(Batch(4, 512), 1))
    other = next(sessions(Batch(4, 512), 2))
    assert len({s.scope for s in some}) == 1 and other.scope != some[0].scope
    first = [s.streams[0].turns[0].input for s in some]
    assert len({p.slice(0, 512 // 3) for p in first}) == 1
    assert len({p.slice(512 // 3, 512 // 3 + 1) for p in first}) == 4
    for session in some:
        turns = session.streams[0].turns
        for before, after in pairwise(turns):
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.input.slice(0, before.input_tokens) == before.input
    assert len({s.streams[0].turns[0].input_tokens for s in some}) > 1


def test_an_engine_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="room for 100 tokens of a session"):
        batches(Reach(4, 100, 1000, 40_000))
