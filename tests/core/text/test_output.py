from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bien.core.testing.text import byte_level
from bien.core.text.model import TextModel
from bien.core.text.tokenizer import Tokenizer

MODEL = TextModel(Tokenizer(byte_level()))
texts = st.text(st.sampled_from("abhelo 漢😀"), max_size=20)


def ids(text: str) -> list[int]:
    return list(MODEL.tokenizer.encode(text).ids())


def run(pieces: list[list[int]], stops: list[str], min_tokens: int = 0) -> tuple[str, int, bool]:
    out = MODEL.output((), stops, min_tokens)
    text = ""
    for piece in pieces:
        text += out.push(piece)[0]
        if out.stopped:
            return text, out.tokens, True
    return text + out.flush(), out.tokens, out.stopped


stop_lists = st.lists(st.text("abh漢", min_size=1, max_size=3), max_size=2)


@given(texts, stop_lists, st.integers(0, 6), st.integers(1, 5))
def test_chunks_of_any_size_give_the_same_text_and_count(
    text: str, stops: list[str], min_tokens: int, size: int
) -> None:
    tokens = ids(text)
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    assert run(chunks, stops, min_tokens) == run([[t] for t in tokens], stops, min_tokens)


def test_surplus_tokens_are_not_counted() -> None:
    out = MODEL.output((), ["b"])
    assert out.push(ids("aabaa")) == ("aa", 3)
    assert (out.tokens, out.stopped) == (3, True)


def test_stop_strings_wait_for_min_tokens() -> None:
    assert run([ids("abab")], ["b"], min_tokens=2) == ("aba", 4, True)


def test_a_stop_token_counts_without_text() -> None:
    out = MODEL.output()
    assert out.push([*ids("a"), *ids("b")], silent_last=True) == ("a", 2)
    assert out.tokens == 2


def test_the_end_gives_out_what_was_held_back() -> None:
    assert run([ids("xhe")], ["hello"]) == ("xhe", 2, False)
