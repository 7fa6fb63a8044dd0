"""Tokenizers from the fields of GGUF files."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from bien.core.errors import ModelError
from bien.core.text.gguf_vocab import end_tokens, gguf_text_config, gguf_tokenizer
from bien.core.text.patterns import PRE_TOKENIZERS
from bien.core.text.tokenizer import Tokenizer
from tests.core.text.families import gguf_fields

# What each pre-tokenizer makes of a text, known from the families' tokenizer.json files.
TEXT = "It's WE'LL don't HelloWorld 12345 a\u0301 你好world x+=1;\n\n  end /n"
WORDS = {
    "gpt-2": "It|'s| WE|'|LL| don|'t| HelloWorld| 12345| a|\u0301| 你好world| x|+=|1|;|\n\n | end| /|n",
    "smollm": "It|'s| WE|'|LL| don|'t| HelloWorld| |1|2|3|4|5| a|\u0301| 你好world| x|+=|1|;|\n\n | end| /|n",
    "llama-bpe": "It|'s| WE|'LL| don|'t| HelloWorld| |123|45| a|\u0301| 你好world| x|+=|1|;\n\n| | end| /|n",
    "glm4": "It|'s| WE|'LL| don|'t| HelloWorld| |123|45| a|\u0301| 你好world| x|+=|1|;\n\n| | end| /|n",
    "qwen2": "It|'s| WE|'LL| don|'t| HelloWorld| |1|2|3|4|5| a|\u0301| 你好world| x|+=|1|;\n\n| | end| /|n",
    "qwen35": "It|'s| WE|'LL| don|'t| HelloWorld| |1|2|3|4|5| a\u0301| 你好world| x|+=|1|;\n\n| | end| /|n",
    "deepseek-coder": "It|'|s| WE|'|LL| don|'|t| HelloWorld| |1|2|3|4|5| a|\u0301| |你好|world| x|+=|1|;"
    "|\n|\n| | end| /|n",
    "deepseek-v3": "It|'s| WE|'LL| don|'t| HelloWorld| |123|45| a\u0301| |你好|world| x|+=|1|;\n\n| | end|"
    " /|n",
    "kimi-k2": "It's| WE'LL| don't| Hello|World| |123|45| a\u0301| |你好|world| x|+=|1|;\n\n| | end| /|n",
    "gpt-4o": "It's| WE'LL| don't| Hello|World| |123|45| a\u0301| 你好world| x|+=|1|;\n\n| | end| /|n",
    "tekken": "It|'s| WE|'LL| don|'t| Hello|World| |1|2|3|4|5| a\u0301| 你好world| x|+=|1|;\n\n| | end| /|n",
}


def made(pre: str, **changes: Any) -> Library:
    fields = {**gguf_fields("llama"), "tokenizer.ggml.pre": pre}
    fields |= {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    return gguf_tokenizer({k: v for k, v in fields.items() if v is not None}, "m.gguf")


@pytest.mark.parametrize("pre", WORDS)
def test_text_is_cut_as_the_family_cuts_it(pre: str) -> None:
    cut = made(pre).pre_tokenizer.pre_tokenize_str(TEXT)
    assert "|".join(TEXT[a:b] for _, (a, b) in cut) == WORDS[pre]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(pre: str, text: str) -> None:
    tokenizer = _cached(pre)
    assert tokenizer.decode(list(tokenizer.encode_plain(text).ids())) == (
        unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
    )


_made: dict[str, Tokenizer] = {}


def _cached(pre: str) -> Tokenizer:
    if pre not in _made:
        _made[pre] = Tokenizer(made(pre))
    return _made[pre]


def test_types_say_what_is_control_and_what_is_found_first() -> None:
    tokens, kinds = (
        gguf_fields("glm")["tokenizer.ggml.tokens"],
        gguf_fields("glm")["tokenizer.ggml.token_type"],
    )
    tokenizer = Tokenizer(gguf_tokenizer(gguf_fields("glm"), "m.gguf"))
    assert tokenizer.control.ids == {i for i, k in enumerate(kinds) if k == 3}
    assert list(tokenizer.encode("[gMASK]<think>").ids()) == [
        tokens.index("[gMASK]"),
        tokens.index("<think>"),
    ]
    assert tokenizer.decode([tokens.index("[gMASK]"), tokens.index("<think>")]) == "<think>"


def test_a_bare_text_begins_with_bos_where_the_file_or_its_family_says_so() -> None:
    begin = gguf_fields("llama")["tokenizer.ggml.bos_token_id"]

    def first(library: Library) -> int:
        return int(library.encode("ab").ids[0])

    assert first(made("llama-bpe")) == begin
    assert first(made("llama-bpe", add_bos_token=False)) != begin
    assert first(made("qwen2")) != begin
    assert first(made("qwen2", add_bos_token=True)) == begin


def test_merges_follow_from_the_ranks_where_a_file_of_ranks_has_none() -> None:
    with_merges, without = made("kimi-k2"), made("kimi-k2", merges=None)
    text = "hello world, the naïve café 你好世界 returns 12345 systems"
    assert without.encode(text).ids == with_merges.encode(text).ids
    assert len(without.encode(text).ids) < len(text) * 0.7
    with pytest.raises(ModelError, match="lacks tokenizer.ggml.merges"):
        made("qwen2", merges=None)


def test_roles_templates_and_ends() -> None:
    fields = gguf_fields("llama")
    begin = fields["tokenizer.ggml.bos_token_id"]
    fields |= {"tokenizer.ggml.eos_token_id": begin + 1, "tokenizer.ggml.eot_token_id": begin + 4}
    fields |= {"tokenizer.ggml.eom_token_id": begin + 4, "tokenizer.chat_template": "a"}
    assert end_tokens(fields) == [begin + 1, begin + 4]
    config = gguf_text_config(fields)
    assert (config["bos_token"], config["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert config["chat_template"] == "a" and "pad_token" not in config
    fields["tokenizer.chat_template.tool_use"] = "b"
    assert gguf_text_config(fields)["chat_template"] == [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not read; valid: gpt2"),
        ({"model": None}, "lacks tokenizer.ggml.model"),
        ({"tokens": ["a", "b"]}, "2 tokens have 426 types"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "2 tokens have 2 types, and 'a' is there twice"),
        ({"add_bos_token": True, "bos_token_id": None}, "lacks tokenizer.ggml.bos_token_id"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        made("qwen2", **changes)


def test_an_unknown_pre_tokenizer_is_refused_with_the_known() -> None:
    with pytest.raises(
        ModelError, match=r"m.gguf: pre-tokenizer 'qwen3' is unknown; valid: chatglm-bpe, .*qwen2"
    ):
        made("qwen3")
