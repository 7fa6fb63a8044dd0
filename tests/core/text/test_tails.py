"""Ids of conversations that are cut at boundaries, kept and put together are those of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library

from bien.core.architectures.builtin import SMOLLM2
from bien.core.models.fetch import resolve_model
from bien.core.testing.text import CHATML, byte_fallback, byte_level
from bien.core.text.model import TextModel
from bien.core.text.tails import Tails
from bien.core.text.template import ChatTemplate
from bien.core.text.tokenizer import Tokenizer
from tests.core.text.families import FAMILIES, write_family

MARK = "\ufdd0"


def odd(**flags: bool) -> Library:
    """Special tokens that overlap, contain one another, swallow blanks, or stand in ordinary text."""
    library = byte_level()
    names = ["<|im_start|>x", "<m>", "|><", "hello", "h", "\n<|"]
    library.add_special_tokens([AddedToken(n, special=True, normalized=False, **flags) for n in names])
    library.add_tokens([AddedToken("<think>", normalized=True), AddedToken("m><", normalized=False)])
    return library


def normalized() -> Library:
    library = byte_fallback()
    forms: Any = normalizers
    library.normalizer = forms.Sequence([forms.Prepend("▁"), forms.Lowercase()])
    library.add_special_tokens([AddedToken("<M>", special=True, normalized=True)])
    library.add_special_tokens([AddedToken("<|raw|>", special=True, normalized=False)])
    return library


@cache
def family(name: str) -> TextModel:
    with TemporaryDirectory() as folder:
        return TextModel.load(write_family(Path(folder), name))


@cache
def tokenizer(name: str) -> Tokenizer:
    made: dict[str, Callable[[], Library]] = {
        "toy": byte_level,
        "metaspace": byte_fallback,
        "normalized": normalized,
        "odd": odd,
        "swallows": lambda: odd(lstrip=True, rstrip=True),
        "swallows behind": lambda: odd(rstrip=True),
        "words": lambda: odd(single_word=True),
    }
    return Tokenizer(made[name]()) if name in made else family(name).tokenizer


TOKENIZERS = ["toy", "metaspace", "normalized", "odd", "swallows", "swallows behind", "words", *FAMILIES]
WORDS = ["<", "|", "|>", "<|", "s>", "<|im_", "im_start", "h", "ello", " ", "\n", " \n ", "x", "a", "b", "漢",
         "\u0301", "e", "it's", "12", MARK, "M", "A"]  # fmt: skip


def texts(source: Tokenizer) -> st.SearchStrategy[str]:
    words = st.sampled_from([*source.added, *source.added, *WORDS])
    return st.lists(words | st.text(max_size=3).filter(lambda t: t.isprintable()), max_size=14).map("".join)


def guarded(source: Tokenizer) -> st.SearchStrategy[str]:
    """As templates write: their own words, and clients' texts guarded."""
    own = st.sampled_from([*source.added, "\n", "user", " "])
    theirs = texts(source).map(lambda t: source.guards.guard(t.replace(MARK, ""), MARK))
    return st.lists(own | theirs, max_size=8).map("".join)


def whole(source: Tokenizer, text: str) -> list[int]:
    return list(source.encode_guarded(text, MARK).ids())


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_ids_are_those_of_the_whole_text_whatever_is_kept(name: str, data: st.DataObject) -> None:
    source = tokenizer(name)
    made = texts(source) | guarded(source)
    text, more, other = data.draw(made), data.draw(made), data.draw(made)
    cut = data.draw(st.integers(0, len(text)))
    tails = Tails(
        source, least=data.draw(st.integers(0, 9)), max_bytes=data.draw(st.sampled_from([500, 1 << 20]))
    )
    for turn in (
        text,
        text[:cut] + other + text[cut:],
        text + more,
        text[:cut],
        text[cut:],
        text + more + other,
    ):
        assert list(tails.encode_guarded(turn, MARK, "a").ids()) == whole(source, turn), turn
    assert tails.held <= 1 << 20


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_smollm2s_ids_are_those_of_the_whole_text(data: st.DataObject) -> None:
    source = smollm2().tokenizer
    made = texts(source) | guarded(source)
    text, more = data.draw(made), data.draw(made)
    cut = data.draw(st.integers(0, len(text)))
    tails = Tails(source, least=data.draw(st.integers(0, 9)))
    for turn in (text, text[:cut] + more, text + more, text[cut:]):
        assert list(tails.encode_guarded(turn, MARK, "a").ids()) == whole(source, turn), turn


@cache
def smollm2() -> TextModel:
    return TextModel.load(resolve_model(SMOLLM2))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_boundaries(name: str) -> None:
    source = tokenizer(name)
    parts = source.boundaries(least=1).parts
    special = [t for t in FAMILIES[name].special if len(t) > 1]
    assert parts("a".join(special)) == [special[0] + "a", *(t + "a" for t in special[1:-1]), special[-1]]


def test_tokens_that_could_reach_across_a_cut_are_no_boundaries() -> None:
    assert tokenizer("toy").boundaries().tokens == ("<s>", "<|im_end|>", "<|im_start|>")
    # "\n<|" may have begun before the "<|" of the others; "|><" may end in "<", and so may "m><"
    assert tokenizer("odd").boundaries().tokens == ()
    assert tokenizer("words").boundaries().tokens == ()
    assert tokenizer("normalized").boundaries().tokens == ("</s>", "<s>", "<unk>", "<|raw|>")


def messages(turns: int) -> list[dict[str, str]]:
    long = "the quick brown fox " * 100
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n} {long}"} for n in range(turns)]


def test_a_new_turn_costs_its_tail() -> None:
    model = TextModel(Tokenizer(byte_level()), ChatTemplate(CHATML))
    costs, lengths = [], []
    for turns in (21, 23, 25):
        ids = model.encode_chat(messages(turns), owner="a")
        assert ids == model.encode_chat(messages(turns))
        costs.append(model.tails.encoded)
        lengths.append(len(ids))
    assert costs[0] == lengths[0]
    for (before, after), (old, new) in zip(pairwise(costs), pairwise(lengths), strict=True):
        assert after - before <= new - old + 20  # and the head of the answer's turn


def test_nobody_can_tell_what_another_tenant_sent() -> None:
    tails = Tails(Tokenizer(byte_level()))
    text = "<|im_start|>" + "a" * 2000
    for owner in ("a", "b", "a\0salt", "\ud800"):
        before = tails.reused
        tails.encode_guarded(text, MARK, owner)
        assert tails.reused == before
    tails.encode_guarded(text, MARK, "b")
    assert tails.reused > 0


def test_memory_is_bounded_and_the_oldest_parts_give_way() -> None:
    source = Tokenizer(byte_level())
    tails = Tails(source, max_bytes=40_000)
    texts = ["<|im_start|>" + chr(97 + n) * 2000 for n in range(20)]
    for text in texts:
        tails.encode_guarded(text, MARK, "")
        assert 0 < tails.held <= 40_000
    before = tails.encoded
    tails.encode_guarded(texts[-1], MARK, "")
    assert tails.encoded == before
    tails.encode_guarded(texts[0], MARK, "")
    assert tails.encoded > before
    none = Tails(source, max_bytes=0)
    assert none.encode_guarded(texts[0], MARK, "") == source.encode(texts[0])
    assert none.held == 0
