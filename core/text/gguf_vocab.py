"""The tokenizer that a GGUF file carries: tokens, their types, merges, the name of the pre-tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Library

from bien.core.errors import ModelError, nearest
from bien.core.text.byte_pairs import Added, Merges, byte_pairs, merges_of
from bien.core.text.patterns import pre_tokenizer

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
MODELS = ("gpt2",)  # values of tokenizer.ggml.model: byte-level BPE
RANKED = ("kimi-k2",)  # pre-tokenizers of vocabularies whose ids are ranks: merges follow from them
_NAMED = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def gguf_tokenizer(fields: Mapping[str, Any], where: str) -> Library:
    """ModelError for another kind of tokenizer, an unknown pre-tokenizer, or fields that do not fit."""
    kind = _need(fields, "model", where)
    if kind not in MODELS:
        raise ModelError(f"{where}: tokenizer.ggml.model {kind!r} is not read; {nearest(str(kind), MODELS)}")
    name = _need(fields, "pre", where)
    pre = pre_tokenizer(name, where)
    tokens, types = _need(fields, "tokens", where), _need(fields, "token_type", where)
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        twice = next((t for i, t in enumerate(tokens) if vocab[t] != i), None)
        raise ModelError(
            f"{where}: {len(tokens)} tokens have {len(types)} types"
            + ("" if twice is None else f", and {twice!r} is there twice")
        )
    added = {
        id: Added(token, special=kind == CONTROL)
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    }
    bos = None
    if fields.get("tokenizer.ggml.add_bos_token", pre.bos):
        bos = tokens[_need(fields, "bos_token_id", where)]
    return byte_pairs(vocab, _merges(fields, name, vocab, added, where), pre, added, where=where, bos=bos)


def gguf_text_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json of the file: special tokens by role, and its chat template(s)."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {role: fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in _NAMED.items()}
    config: dict[str, Any] = {role: tokens[id] for role, id in ids.items() if id is not None}
    named = [{"name": n, "template": fields[f"tokenizer.chat_template.{n}"]} for n in _template_names(fields)]
    default = fields.get("tokenizer.chat_template")
    if named:
        own = [{"name": "default", "template": default}] if default is not None else []
        config["chat_template"] = own + named
    elif default is not None:
        config["chat_template"] = default
    return {
        **config,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def end_tokens(fields: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: of the text, of a turn, of a message that awaits a tool."""
    names = ("eos", "eot", "eom")
    found = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(int(id) for id in found if id is not None))


def _merges(
    fields: Mapping[str, Any], pre: str, vocab: Mapping[str, int], added: Mapping[int, Added], where: str
) -> Merges:
    lines = fields.get("tokenizer.ggml.merges")
    if lines is None and pre in RANKED:
        return merges_of({token: id for token, id in vocab.items() if id not in added})
    pairs = [tuple(line.split(" ")) for line in _need(fields, "merges", where)]
    wrong = next((p for p in pairs if len(p) != 2), None)
    if wrong is not None:
        raise ModelError(f"{where}: merge {' '.join(wrong)!r} is no pair of tokens")
    return pairs


def _template_names(fields: Mapping[str, Any]) -> list[str]:
    head = "tokenizer.chat_template."
    return sorted(name.removeprefix(head) for name in fields if name.startswith(head))


def _need(fields: Mapping[str, Any], name: str, where: str) -> Any:
    found = fields.get(f"tokenizer.ggml.{name}")
    if found is None:
        raise ModelError(f"{where} lacks tokenizer.ggml.{name}, without which its tokenizer is not known")
    return found
