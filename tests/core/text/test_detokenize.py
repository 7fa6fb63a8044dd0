from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.testing.text import byte_fallback, byte_level
from bien.core.text.detokenize import Detokenizer
from bien.core.text.tokenizer import Tokenizer

BYTES = Tokenizer(byte_level())
FALLBACK = Tokenizer(byte_fallback())
texts = st.text(st.sampled_from("ab hello<|im▁ \n\té漢字😀👩‍🚀\u0301"), max_size=20)


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[i:j] for i, j in itertools.pairwise(edges)]


def streamed(tokenizer: Tokenizer, pieces: list[list[int]], tail: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, tail or ())
    return [detokenizer.push(p) for p in pieces] + [detokenizer.flush()]


@settings(max_examples=300)
@given(st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=60), st.lists(st.integers(0, 99), max_size=8))
def test_any_ids_in_any_split_give_the_text_of_the_whole(ids: list[int], cuts: list[int]) -> None:
    assert "".join(streamed(BYTES, cut(ids, cuts))) == BYTES.decode(ids)


@given(texts, st.lists(st.integers(0, 99), max_size=8), st.sampled_from([BYTES, FALLBACK]))
def test_text_survives_any_split_and_no_piece_holds_half_a_character(
    text: str, cuts: list[int], tokenizer: Tokenizer
) -> None:
    ids = list(tokenizer.encode(text).ids())
    pieces = streamed(tokenizer, cut(ids, cuts))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in p for p in pieces)


@given(st.lists(st.integers(3, 258), min_size=40, max_size=200))
def test_garbage_is_shown_before_the_end_and_the_window_stays_small(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    for token in ids:
        detokenizer.push([token])
        assert len(detokenizer._ids) <= 64


def test_an_open_character_is_held_until_its_last_byte() -> None:
    detokenizer = Detokenizer(BYTES)
    ids = list(BYTES.encode("a😀b").ids())
    assert [detokenizer.push([t]) for t in ids] == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    detokenizer = Detokenizer(BYTES)
    ids = list(BYTES.encode("a😀").ids())[:-1]
    assert detokenizer.push(ids) + detokenizer.flush() == "a\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(("prompt", "expected"), [("b", " a b"), ("", "a b")])
def test_a_word_boundary_after_the_prompt_is_kept(prompt: str, expected: str) -> None:
    tail = list(FALLBACK.encode(prompt).ids())
    assert "".join(streamed(FALLBACK, [list(FALLBACK.encode("a b").ids())], tail)) == expected


def test_control_tokens_have_no_text() -> None:
    assert "".join(streamed(BYTES, [[0, 1], [2], list(BYTES.encode("hello").ids()), [1]])) == "hello"
