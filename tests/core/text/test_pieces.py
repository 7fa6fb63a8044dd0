from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from bien.core.testing.text import byte_fallback, byte_level
from bien.core.text.tokenizer import Tokenizer

BYTES, WORDS = Tokenizer(byte_level()), Tokenizer(byte_fallback())


@given(st.text())
def test_bytes_of_the_tokens_are_the_text(text: str) -> None:
    ids = BYTES.encode_plain(text).ids()
    assert b"".join(BYTES.piece(i)[1] for i in ids).decode() == text


@given(st.text(alphabet="ab é€😀", min_size=1))
def test_words_with_byte_fallback(text: str) -> None:
    ids = WORDS.encode_plain(text).ids()
    assert b"".join(WORDS.piece(i)[1] for i in ids).decode().lstrip() == text.lstrip()


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS])
def test_parts_of_a_character_are_told_apart(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode_plain("é").ids())[-2:]
    assert [tokenizer.piece(i) for i in ids] == [("bytes:\\xc3", b"\xc3"), ("bytes:\\xa9", b"\xa9")]


def test_control_and_added_tokens_read_as_they_are_written() -> None:
    library = byte_level()
    library.add_tokens([AddedToken("é ＜b＞")])
    tokenizer = Tokenizer(library)
    assert tokenizer.piece(0) == ("<|im_start|>", b"<|im_start|>")
    assert tokenizer.piece(tokenizer.vocab_size - 1) == ("é ＜b＞", "é ＜b＞".encode())


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    assert BYTES.piece(BYTES.vocab_size) == ("", b"")
