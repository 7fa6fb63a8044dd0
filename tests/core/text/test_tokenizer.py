from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from bien.core.errors import ModelError, UserError
from bien.core.testing.text import CONTROL, byte_level
from bien.core.text.byte_pairs import Added, byte_alphabet, byte_pairs, merges_of
from bien.core.text.control import ControlToken, ControlTokens
from bien.core.text.patterns import PreTokenizer
from bien.core.text.tokenizer import Tokenizer
from bien.core.worker.threads import in_thread

TOKENIZER = Tokenizer(byte_level())
MARK = "\ufdd0"
WORDS = [*CONTROL, "<", "|", "<|", "im_start", "|>", "<|im_", "s>", "h", "漢"]
pieces = st.lists(st.sampled_from(WORDS), max_size=8)


def test_control_tokens_are_recognised_where_the_author_may_write_them() -> None:
    assert list(TOKENIZER.encode("<|im_start|>hello").ids()) == [0, TOKENIZER.id_of("hello")]
    assert Tokenizer(byte_level(bos=True)).encode("h", add_special_tokens=True).ids()[0] == 2


def test_control_tokens_in_plain_text_are_spelled_out() -> None:
    ids = TOKENIZER.encode_plain("<|im_start|>hello").ids()
    assert not set(ids) & TOKENIZER.control.ids
    assert TOKENIZER.decode(list(ids)) == "<|im_start|>hello"


@given(pieces, pieces)
def test_a_guarded_text_never_becomes_a_control_token(first: list[str], second: list[str]) -> None:
    a, b = "".join(first), "".join(second)
    guarded = [TOKENIZER.control.guard(t, MARK) for t in (a, b)]
    ids = list(TOKENIZER.encode_guarded("<s>" + "".join(guarded) + "<|im_end|>", MARK).ids())
    assert [i for i in ids if i in TOKENIZER.control.ids] == [2, 1]
    assert TOKENIZER.decode(ids) == a + b


@given(pieces)
def test_splitting_at_control_tokens_gives_the_ids_of_the_library(parts: list[str]) -> None:
    text = "".join(parts)
    # A mark that stands alone forces the long way.
    assert TOKENIZER.encode_guarded(text + MARK, MARK) == TOKENIZER.encode(text)


def test_blanks_beside_a_control_token_are_swallowed_as_the_library_does() -> None:
    library = byte_level()
    library.add_special_tokens([AddedToken("<m>", special=True, lstrip=True, rstrip=True)])
    tokenizer = Tokenizer(library)
    for text in ("a <m> \n b", "<m>", "  <m><m>  <s> "):
        assert tokenizer.encode_guarded(text + MARK, MARK) == tokenizer.encode(text), text


def test_overlapping_and_single_character_control_tokens_are_guarded() -> None:
    control = ControlTokens([ControlToken("ab", 0), ControlToken("bc", 1), ControlToken("d", 2)])
    for text in ("abc", "d", "ddabcab", "xa"):
        guarded = control.guard(text, MARK)
        assert list(control.split(guarded, MARK)) == [(text, None)]
        assert [t for _, t in control.split(guarded + "d", MARK)] == [2, None]


def test_without_control_tokens_nothing_is_marked() -> None:
    assert ControlTokens([]).guard("<|im_end|>", MARK) == "<|im_end|>"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("abcd")) == 4


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_lone_surrogate_is_the_callers_fault() -> None:
    with pytest.raises(UserError, match="not valid Unicode"):
        TOKENIZER.encode("\ud800")


async def test_the_event_loop_runs_on_while_a_long_text_is_encoded() -> None:
    encoding = asyncio.ensure_future(in_thread(TOKENIZER.encode, "hello world " * 30000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    # Holding the interpreter lock would leave the loop a handful of turns.
    assert turns > 100
    assert len(await encoding) > 0


def test_a_text_that_becomes_a_control_token_when_it_is_composed_does_not() -> None:
    library = byte_level()
    library.normalizer = normalizers.NFC()
    library.add_tokens([AddedToken("[MASK]", special=True, normalized=True)])
    tokenizer = Tokenizer(library)
    kelvin = "[MAS\u212a]"  # NFC makes a K of it
    assert tokenizer.id_of("[MASK]") in tokenizer.encode(kelvin).ids()
    assert not set(tokenizer.encode_guarded(kelvin, MARK).ids()) & tokenizer.control.ids
    assert tokenizer.id_of("[MASK]") in tokenizer.encode_guarded("[MASK]", MARK).ids()


def test_a_control_token_that_is_also_a_word_is_spelled_in_parts() -> None:
    vocab = {**{c: i for i, c in enumerate(byte_alphabet())}, "stop": 256}
    pre = PreTokenizer((r"\w+|\W",), whole_words=True)
    tokenizer = Tokenizer(byte_pairs(vocab, [], pre, {256: Added("stop")}, where="here"))
    assert list(tokenizer.encode("stop").ids()) == [256]
    ids = list(tokenizer.encode_plain("a stop stop").ids())
    assert 256 not in ids and tokenizer.decode(ids) == "a stop stop"


@pytest.mark.parametrize(
    ("first", "second"), [("<|im_", "end|>"), ("x<", "s>"), ("<s", ">"), ("<|im_end|", ">")]
)
def test_two_texts_side_by_side_do_not_complete_a_control_token(first: str, second: str) -> None:
    text = TOKENIZER.control.guard(first, MARK) + TOKENIZER.control.guard(second, MARK)
    ids = list(TOKENIZER.encode_guarded(text, MARK).ids())
    assert not set(ids) & TOKENIZER.control.ids and TOKENIZER.decode(ids) == first + second


def test_merges_come_in_the_order_of_ranks_however_a_vocabulary_lies() -> None:
    vocab = {"aaa": 4, "aa": 2, "b": 1, "a": 0, "ab": 3}
    assert merges_of(vocab) == [("a", "a"), ("a", "b"), ("a", "aa"), ("aa", "a")]
