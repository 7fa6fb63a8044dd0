from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.errors import UserError
from bien.core.request import BlockRuns
from bien.traces.materialize import Materializer, scoped, virtual_ids
from tests.traces.test_prefix import contents, shared


@given(contents, st.integers(8, 200_000), st.integers(0, 5))
def test_one_virtual_id_is_one_safe_token(content: BlockRuns, vocabulary: int, seed: int) -> None:
    make = Materializer(vocabulary, seed)
    ids = list(make.tokens(content, "scope").ids())
    assert len(ids) == len(content)
    assert all(make.low <= i < make.high <= vocabulary for i in ids)
    names = dict(zip(virtual_ids(content).tolist(), ids, strict=True))
    assert ids == [names[v] for v in virtual_ids(content).tolist()]


def test_seed_and_scope_change_the_tokens() -> None:
    content = BlockRuns.of([(5, 64)])
    make = Materializer(49152)
    assert make.tokens(content, "a") == make.tokens(content, "a")
    assert make.tokens(content, "a") != make.tokens(content, "b")
    assert make.tokens(content, "a") != Materializer(49152, 1).tokens(content, "a")


def test_neighbouring_ids_give_unlike_tokens() -> None:
    ids = Materializer(49152).tokens(BlockRuns.of([(0, 4096)]), "a").ids()
    assert len(set(ids)) > 3800


def test_a_vocabulary_without_a_middle_is_refused() -> None:
    with pytest.raises(UserError, match="vocabulary of 1"):
        Materializer(1)


@given(contents, contents)
def test_scoped_content_shares_within_its_scope_only(a: BlockRuns, b: BlockRuns) -> None:
    assert shared(scoped(a, "x"), scoped(b, "x")) == shared(a, b)
    assert shared(scoped(a, "x"), scoped(a, "y")) == 0
    assert len(scoped(a, "x")) == len(a)
