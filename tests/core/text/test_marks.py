"""Control tokens are handed over as marks, between the text before and behind them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from bien.core.testing.text import byte_level
from bien.core.text.detokenize import Detokenizer
from bien.core.text.marks import Mark, Piece
from bien.core.text.model import TextModel
from bien.core.text.tokenizer import Tokenizer


def make() -> TextModel:
    library = byte_level()
    library.add_tokens([AddedToken("<tag>", special=False, normalized=False)])
    return TextModel(Tokenizer(library))


MODEL = make()
START, TAG = MODEL.tokenizer.id_of("<|im_start|>"), MODEL.tokenizer.id_of("<tag>")
NAMES = ["<|im_start|>", "<tag>", "<unknown>"]
MARK = Mark("<|im_start|>")


def ids(text: str) -> list[int]:
    return list(MODEL.tokenizer.encode_plain(text).ids())


def take(tokens: list[Any], *, exact: bool = False, **options: Any) -> tuple[list[Piece], Any]:
    output = MODEL.output(marks=MODEL.marks(NAMES, exact=exact), **options)
    out: list[Piece] = []
    for token in tokens:
        out += output.take(token)
        if output.stopped:
            break
    if not output.stopped:
        out += [piece for piece in (output.flush(),) if piece]
    return out, output


def joined(pieces: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        if out and isinstance(piece, str) and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out


def test_special_tokens_come_as_marks_and_others_as_text_unless_it_is_exact() -> None:
    tokens = [*ids("a"), START, *ids("b"), TAG, *ids("c"), 1]
    assert joined(take(tokens)[0]) == ["a", MARK, "b<tag>c"]
    assert joined(take(tokens, exact=True)[0]) == ["a", MARK, "b", Mark("<tag>"), "c"]


def test_text_that_only_spells_one_is_text() -> None:
    assert joined(take(ids("<|im_start|>"), exact=True)[0]) == ["<|im_start|>"]


def test_a_mark_inside_a_character_breaks_it() -> None:
    head, *tail = ids("é")
    assert joined(take([head, START, *tail, *ids("x")])[0]) == ["\ufffd", MARK, "\ufffdx"]


@given(st.lists(st.integers(0, MODEL.tokenizer.vocab_size + 1), max_size=30))
def test_without_marks_it_is_the_text(tokens: list[int]) -> None:
    plain = Detokenizer(MODEL.tokenizer)
    text = "".join("".join(map(str, plain.pieces(t))) for t in tokens) + plain.flush()
    assert text == Detokenizer(MODEL.tokenizer).push(tokens) + _flushed(tokens)


def _flushed(tokens: list[int]) -> str:
    detokenizer = Detokenizer(MODEL.tokenizer)
    detokenizer.push(tokens)
    return detokenizer.flush()


@pytest.mark.parametrize(
    ("tokens", "stops", "pieces", "stop"),
    [
        ([*ids("ab"), START, *ids("cd")], ["bc"], ["ab", MARK, "cd"], None),  # not across a mark
        ([*ids("ab"), START, *ids("cd")], ["cd"], ["ab", MARK], "cd"),
        ([*ids("ab"), TAG, *ids("cd")], ["<tag>"], ["ab"], "<tag>"),
        ([*ids("ab"), START, *ids("b")], ["bx"], ["ab", MARK, "b"], None),
    ],
)
def test_stop_strings(tokens: list[Any], stops: list[str], pieces: list[Piece], stop: str | None) -> None:
    found, output = take(tokens, stops=stops)
    assert (joined(found), output.matched) == (pieces, stop)


def test_what_counts() -> None:
    output = MODEL.output(stops=["zz"], min_tokens=2, marks=MODEL.marks(NAMES, exact=True))
    assert output.take(START) == [MARK]
    assert output.take(*ids("z")) == ["z"]  # the first tokens are not looked at
    assert output.take(1, silent=True) == []
    assert (output.tokens, output.flush(), output.visible) == (3, "", 3)


def test_prompts_ends_are_spelled() -> None:
    assert MODEL.spelled([START, *ids("é "), TAG]) == "<|im_start|>é <tag>"  # type: ignore[list-item]
