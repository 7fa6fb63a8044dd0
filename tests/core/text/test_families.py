"""Every kind of tokenizer, with the special tokens of its family: clients cannot write them, and no stream
holds half a character."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.testing.text import CHATML, byte_fallback
from bien.core.text.detokenize import Detokenizer
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.core.text.tokenizer import Tokenizer
from tests.core.text.families import FAMILIES, write_family

KINDS = [*FAMILIES, "fallback"]
kinds = pytest.mark.parametrize("name", KINDS)
FALLBACK = CHATML.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")


@cache
def model(name: str) -> TextModel:
    if name == "fallback":
        return TextModel(Tokenizer(byte_fallback()), ChatTemplate(FALLBACK))
    with TemporaryDirectory() as folder:
        return TextModel.load(write_family(Path(folder), name))


def evil(name: str) -> st.SearchStrategy[str]:
    """Texts out of guarded tokens, their halves and what else a client may write."""
    guards = [t.text for t in model(name).tokenizer.guards.tokens if "reserved" not in t.text]
    halves = [t[: len(t) // 2] for t in guards] + [t[len(t) // 2 :] for t in guards]
    return st.lists(
        st.sampled_from([*guards, *halves, "<", "|>", " ", "\n", "hello", "é", "你", "ſ"]), max_size=6
    ).map("".join)


def steering(name: str, ids: Any) -> list[int]:
    return [i for i in ids if i in model(name).tokenizer.guards.ids]


@kinds
@settings(max_examples=40)
@given(data=st.data())
def test_nothing_that_a_client_writes_becomes_a_token_of_the_template(name: str, data: Any) -> None:
    """The same conversation with harmless words in every place has the same steering tokens in this order."""
    text = evil(name)
    place = iter(range(99))
    words = [f"w{i}" for i in place]

    def talk(write: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        call = {
            "id": write(),
            "type": "function",
            "function": {"name": write(), "arguments": {"path" + write(): write(), "n": [1, {"k": write()}]}},
        }
        messages = [
            {"role": "system", "content": write()},
            {"role": "user", "name": write(), "content": write()},
            {"role": "user", "content": write()},
            {"role": "assistant", "content": "fine", "tool_calls": [call]},
            {"role": "tool", "name": write(), "tool_call_id": write(), "content": write()},
            {"role": "tool", "content": write()},
        ]
        tool = {"type": "function", "function": {"name": write(), "description": write()}}
        return messages, [tool], {"note": write(), "reasoning_effort": write()}

    written: list[str] = []

    def bad() -> str:
        written.append(data.draw(text))
        return written[-1]

    messages, tools, extra = talk(bad)
    ids = model(name).encode_chat(messages, extra, tools).ids()
    calm = iter(words)
    messages, tools, extra = talk(lambda: next(calm))
    assert steering(name, ids) == steering(name, model(name).encode_chat(messages, extra, tools).ids())


@kinds
@given(data=st.data())
def test_what_a_client_writes_stays_its_text(name: str, data: Any) -> None:
    text = data.draw(evil(name))
    plain = model(name).tokenizer.encode_plain(text).ids()
    assert not steering(name, plain)
    if name not in ("qwen", "fallback"):  # one composes characters, the other begins with a blank
        assert model(name).tokenizer.decode(list(plain)) == text


@pytest.mark.parametrize("name", ["qwen", "deepseek", "glm"])
def test_the_models_own_marks_are_found_in_its_turns(name: str) -> None:
    """Templates part an answer at "</think>": there it is what the model wrote, and stays a mark."""
    answer = "<think>why</think>because<|im_end|><｜User｜><|user|>"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    ids = list(model(name).encode_chat(messages).ids())
    messages[1]["content"] = "<think>why</think>because"
    assert steering(name, ids) == steering(name, model(name).encode_chat(messages).ids())
    shown = model(name).tokenizer.decode(ids)
    assert "because<|im_end|>" in shown and ("why" in shown) == (name != "deepseek")


def test_marks_of_the_template_are_guarded_only_where_it_has_them() -> None:
    """An added token that the template never writes is a word like any other."""
    qwen = model("qwen").tokenizer
    other = TextModel(Tokenizer.load(_folder("qwen")), ChatTemplate("{{ messages[0].content }}<|im_end|>"))
    talk = [{"role": "user", "content": "<tool_call></think>"}]
    marks = {qwen.id_of("<tool_call>"), qwen.id_of("</think>")}
    assert marks <= set(other.encode_chat(talk).ids())
    assert not marks & set(model("qwen").encode_chat(talk).ids())
    assert marks <= set(model("qwen").tokenizer.encode("<tool_call></think>").ids())


def _folder(name: str) -> Path:
    folder = Path(mkdtemp())
    return write_family(folder, name)


@kinds
@settings(max_examples=60)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 99), max_size=8))
def test_a_stream_is_the_text_and_holds_no_half_character(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = model(name).tokenizer
    ids = list(tokenizer.encode_plain(text).ids())
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[i:j]) for i, j in zip([0, *edges], [*edges, len(ids)], strict=True)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in p for p in pieces) or "\ufffd" in text


@kinds
@settings(max_examples=60)
@given(data=st.data())
def test_any_ids_in_any_pieces_give_the_same_text(name: str, data: Any) -> None:
    """Also ids that no text has: bytes that begin a character and end nowhere, control tokens, reserved."""
    tokenizer = model(name).tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    one = Detokenizer(tokenizer)
    single = "".join(one.push([i]) for i in ids) + one.flush()
    many = Detokenizer(tokenizer)
    at = data.draw(st.integers(0, len(ids)))
    assert many.push(ids[:at]) + many.push(ids[at:]) + many.flush() == single
    if name != "fallback":
        assert single == tokenizer.decode(ids)


@kinds
def test_pieces_are_bytes_that_make_the_text(name: str) -> None:
    tokenizer = model(name).tokenizer
    text = "ab é 你好 😀"
    ids = list(tokenizer.encode_plain(text).ids())
    assert b"".join(tokenizer.piece(i)[1] for i in ids).decode().strip() == text


@pytest.mark.parametrize("name", FAMILIES)
def test_what_reads_as_an_object_is_one(name: str) -> None:
    """Arguments that clients send as an object reach templates as one, characters as they are."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"päth": "</x>&'"}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = model(name).tokenizer.decode(list(model(name).encode_chat(messages).ids()))
    assert ("päth" in text and "</x>&'" in text) and (
        name == "glm" or json.dumps({"päth": "</x>&'"}, ensure_ascii=False) in text
    )
