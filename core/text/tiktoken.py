"""Tokenizers of folders that hold a tiktoken file: a token in base64 and its rank, one a line.

The file says neither how text is cut into words nor what the special tokens are. The first follows from
`tokenizer_class` in tokenizer_config.json (publishers have it in Python code, which is not run here) or is
said there as `pat_str`; the second is its `added_tokens_decoder`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Library

from bien.core.errors import ModelError, nearest
from bien.core.text.byte_pairs import Added, byte_pairs, decoder_row, fill, merges_of, spelled
from bien.core.text.files import read_object, token_text
from bien.core.text.patterns import PreTokenizer, pre_tokenizer

NAMES = ("tiktoken.model", "tokenizer.model")  # the second is SentencePiece's name, too


class _Family(NamedTuple):
    pre: str
    reserved: int = 0  # ids behind the ranks that are tokens, named or not
    name: str = "<|reserved_token_{}|>"  # of those that are not
    usual: tuple[str, ...] = ()  # special tokens where the config lists none


_QWEN = _Family("qwen2")
_FAMILIES = {
    "TikTokenTokenizer": _Family("kimi-k2", reserved=256),  # Kimi
    "QWenTokenizer": _Family(
        "qwen2",
        usual=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    ),
    "Qwen2Tokenizer": _QWEN,
    "Qwen2TokenizerFast": _QWEN,
    "ChatGLM4Tokenizer": _Family("chatglm-bpe"),
}


def find_ranks(folder: Path) -> Path | None:
    """The folder's tiktoken file, if it has one. ModelError for several."""
    found = [folder / n for n in NAMES if _is_ranks(folder / n)]
    found += sorted(p for p in folder.glob("*.tiktoken") if p.is_file())
    if len(found) > 1:
        raise ModelError(f"{folder} holds {', '.join(p.name for p in found)}; one tiktoken file is needed")
    return found[0] if found else None


def load_tiktoken(path: Path) -> Library:
    """ModelError for a damaged file, and where tokenizer_config.json beside it does not say enough."""
    where = path.parent / "tokenizer_config.json"
    config = read_object(where)
    family, pre = _family(config, where)
    vocab = spelled(read_ranks(path))
    rows = config.get("added_tokens_decoder") or {}
    try:
        added = {int(id): decoder_row(row) for id, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{where}: added_tokens_decoder is no table of tokens by id: {error!r}") from error
    if not added:
        added = {len(vocab) + i: Added(text) for i, text in enumerate(family.usual)}
    if not added:
        raise ModelError(
            f"{where} lacks 'added_tokens_decoder', which names the special tokens of {path.name}"
        )
    added = fill(added, len(vocab), family.reserved, family.name)
    bos = token_text(config.get("bos_token")) if config.get("add_bos_token") else None
    return byte_pairs(vocab, merges_of(vocab), pre, added, where=str(path), bos=bos)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, the ranks 0, 1, 2 ..., every byte a token. ModelError naming the line that is wrong."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            shown = line[:60].decode("ascii", "backslashreplace")
            raise ModelError(
                f"{path} line {number} is {shown!r}; a line holds a token in base64 and its rank"
            ) from error
    lacking = [b for b in range(256) if bytes([b]) not in ranks]
    if lacking:
        raise ModelError(f"{path} lacks the tokens of {len(lacking)} bytes: {lacking[:8]}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path}: its {len(ranks)} tokens do not have the ranks 0 to {len(ranks) - 1}")
    return ranks


def _family(config: Mapping[str, Any], where: Path) -> tuple[_Family, PreTokenizer]:
    kind, pattern = config.get("tokenizer_class"), config.get("pat_str")
    if kind not in _FAMILIES and not isinstance(pattern, str):
        raise ModelError(
            f"{where}: tokenizer_class {kind!r} does not tell how text is cut before it is merged; "
            f"{nearest(str(kind), _FAMILIES)}, or any with 'pat_str'"
        )
    family = _FAMILIES.get(str(kind), _Family("gpt-2"))
    # tiktoken looks for a word as a whole before it merges.
    pre = pre_tokenizer(family.pre, str(where))._replace(whole_words=True)
    return family, pre._replace(splits=(pattern,)) if isinstance(pattern, str) else pre


def _is_ranks(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        first = file.readline(1 << 16).split()
    try:
        return len(first) == 2 and bool(base64.b64decode(first[0], validate=True)) and first[1].isdigit()
    except binascii.Error:
        return False
