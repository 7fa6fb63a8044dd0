from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.plan import i32
from bien.core.sampling.verify import verify_rows

# Per row: None = a chunk, else (drawn tokens, drafts) with one more token than drafts. Two token values
# make matches common.
TOKEN = st.integers(0, 1)
YIELD = st.integers(0, 4).flatmap(
    lambda k: st.tuples(
        st.lists(TOKEN, min_size=k + 1, max_size=k + 1), st.lists(TOKEN, min_size=k, max_size=k)
    )
)
ROWS = st.lists(st.one_of(st.none(), YIELD), min_size=1, max_size=8)


def slow(drawn: list[int], drafts: list[int]) -> list[int]:
    out = []
    for j, token in enumerate(drawn):
        out.append(token)
        if j == len(drafts) or drafts[j] != token:
            break
    return out


@settings(max_examples=200, deadline=None)
@given(ROWS, st.data())
def test_against_a_loop(rows: list[tuple[list[int], list[int]] | None], data: st.DataObject) -> None:
    drawn = [t for row in rows if row for t in row[0]]
    forced = data.draw(st.lists(st.sampled_from([-1, -1, 0, 1]), min_size=len(drawn), max_size=len(drawn)))
    verdict = verify_rows(
        i32(drawn),
        i32([row is not None for row in rows]),
        i32([len(row[1]) if row else 0 for row in rows]),
        i32([t for row in rows if row for t in row[1]]),
        i32(forced) if data.draw(st.booleans()) or any(f >= 0 for f in forced) else None,
    )
    final = [t if f < 0 else f for t, f in zip(drawn, forced, strict=True)]
    tokens: list[int] = []
    accepted = []
    at = 0
    for row in rows:
        if row is None:
            accepted.append(0)
            continue
        got = slow(final[at : at + len(row[0])], row[1])
        at += len(row[0])
        accepted.append(len(got))
        tokens += got
    assert verdict.accepted.tolist() == accepted
    assert verdict.tokens.tolist() == tokens
    assert verdict.accepted.dtype == verdict.tokens.dtype == np.int32


def test_a_forced_token_rejects_a_draft_that_the_target_would_have_drawn() -> None:
    verdict = verify_rows(i32([5, 6]), i32([1]), i32([1]), i32([5]), i32([9, -1]))
    assert (verdict.accepted.tolist(), verdict.tokens.tolist()) == ([1], [9])


def test_a_forced_token_accepts_the_same_draft() -> None:
    verdict = verify_rows(i32([5, 6]), i32([1]), i32([1]), i32([9]), i32([9, -1]))
    assert (verdict.accepted.tolist(), verdict.tokens.tolist()) == ([2], [9, 6])
