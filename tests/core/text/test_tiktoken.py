"""Tokenizers from tiktoken files, held against ranks merged the slow way and against transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import TikTokenConverter

from bien.core.errors import ModelError
from bien.core.text.tiktoken import find_ranks, load_tiktoken, read_ranks
from bien.core.text.tokenizer import Tokenizer
from tests.core.text.families import FAMILIES, write_family

# As Kimi's and Qwen's code has them, written out.
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = {"kimi": KIMI, "qwen": QWEN}
texts = st.lists(
    st.sampled_from(
        [
            *"abehilorstTHW '\n\t1234",
            "  ",
            "hello",
            " world",
            "it's",
            "WE'LL",
            "你好",
            "世",
            "é",
            "привет",
            "😀",
            "|>",
        ]
    ),
    max_size=24,
).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("tiktoken")
    for name in PATTERNS:
        (home / name).mkdir()
        write_family(home / name, name)
    return {name: home / name for name in PATTERNS}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


def slow(ranks: dict[bytes, int], pattern: str, text: str) -> list[int]:
    """Of all neighbours the pair with the lowest rank is joined, the first of equals, until none has one."""
    out = []
    for word in regex.findall(pattern, text, flags=regex.V1):
        parts = [bytes([b]) for b in word.encode()]
        while len(parts) > 1:
            pairs = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
            rank, at = min(pairs)
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out += [ranks[p] for p in parts]
    return out


@pytest.mark.parametrize("name", PATTERNS)
@given(text=texts)
def test_it_merges_as_ranks_say(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    ranks = read_ranks(folders[name] / "tiktoken.model")
    assert list(tokenizers[name].encode_plain(text).ids()) == slow(ranks, PATTERNS[name], text)


@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_what_transformers_makes_of_the_file(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folders[name] / "tiktoken.model"
    monkeypatch.setattr(
        TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda url: read_ranks(Path(url)))
    )
    special = list(FAMILIES[name].special)
    theirs = json.loads(
        TikTokenConverter(str(path), PATTERNS[name], extra_special_tokens=special).converted().to_str()
    )
    ours = json.loads(load_tiktoken(path).to_str())
    assert ours["model"] == theirs["model"]
    assert ours["pre_tokenizer"]["pretokenizers"][0] == theirs["pre_tokenizer"]["pretokenizers"][0]
    named = {t["content"]: t["id"] for t in ours["added_tokens"]}
    assert {t["content"]: t["id"] for t in theirs["added_tokens"]}.items() <= named.items()


@given(text=st.text(), raw=st.binary(max_size=12))
def test_any_text_comes_back(tokenizers: dict[str, Tokenizer], text: str, raw: bytes) -> None:
    kimi = tokenizers["kimi"]  # Qwen's composes characters first
    for value in (text, raw.decode("latin-1"), raw.decode("utf-8", "replace")):
        assert kimi.decode(list(kimi.encode_plain(value).ids())) == value


def test_qwen_composes_characters(tokenizers: dict[str, Tokenizer]) -> None:
    qwen = tokenizers["qwen"]
    assert qwen.encode("e\u0301") == qwen.encode("é")
    assert tokenizers["kimi"].encode("e\u0301") != tokenizers["kimi"].encode("é")


def test_ids_without_a_name_are_reserved_and_special(tokenizers: dict[str, Tokenizer]) -> None:
    kimi = tokenizers["kimi"]
    assert kimi.vocab_size == 420 + 256
    assert kimi.id_of("<|reserved_token_500|>") == 500 and 500 in kimi.control.ids
    assert kimi.id_of("[BOS]") == 420 and kimi.id_of("<think>") not in kimi.control.ids


def put(folder: Path, config: dict[str, Any], name: str = "tiktoken.model", lines: Any = None) -> Path:
    rows = lines or [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)]
    (folder / name).write_bytes(b"\n".join(rows))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_files_of_other_names_and_patterns_of_ones_own(tmp_path: Path) -> None:
    config = {"pat_str": r"\w+|\W", "added_tokens_decoder": {"256": {"content": "<e>", "special": True}}}
    assert list(Tokenizer.load(put(tmp_path, config, "qwen.tiktoken")).encode("ab<e>").ids()) == [97, 98, 256]
    old = Tokenizer.load(put(tmp_path, {"tokenizer_class": "QWenTokenizer"}, "qwen.tiktoken"))
    assert (old.id_of("<|im_end|>"), old.id_of("<|extra_204|>"), old.vocab_size) == (258, 463, 464)
    (tmp_path / "qwen.tiktoken").unlink()
    bos = {"tokenizer_class": "ChatGLM4Tokenizer", "add_bos_token": True, "bos_token": {"content": "<e>"}}
    glm = Tokenizer.load(put(tmp_path, config | bos, "tokenizer.model"))
    assert list(glm.encode("a", add_special_tokens=True).ids()) == [256, 97]
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00")  # SentencePiece's
    assert find_ranks(tmp_path) is None


def broken() -> Iterator[tuple[str, dict[str, Any], Any]]:
    kimi: dict[str, Any] = {"tokenizer_class": "TikTokenTokenizer"}
    token = {"content": "<e>", "special": True}
    rows = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)]
    yield "does not tell how text is cut.*valid: ChatGLM4", {"tokenizer_class": "Other"}, None
    yield "does not tell how text is cut", {}, None
    yield "lacks 'added_tokens_decoder'", {"tokenizer_class": "Qwen2Tokenizer"}, None
    yield "no table of tokens by id", {**kimi, "added_tokens_decoder": {"x": token}}, None
    yield "no table of tokens by id", {**kimi, "added_tokens_decoder": {"256": {}}}, None
    yield "'<e>' has id 9, and would get", {**kimi, "added_tokens_decoder": {"9": token}}, None
    yield (
        "'<e>' has id 25.*each text once",
        {**kimi, "added_tokens_decoder": {"256": token, "257": token}},
        None,
    )
    yield "line 257 is 'AAA 256'", kimi, [*rows, b"AAA 256"]
    yield "line 257 is 'QUE= x'", kimi, [*rows, b"QUE= x"]
    yield "257 tokens do not have the ranks 0 to 256", kimi, [*rows, b"QUE= 300"]
    yield r"cannot be cut by .*a\(", {"pat_str": "a(", "added_tokens_decoder": {"256": token}}, None
    yield r"lacks the tokens of 1 bytes: \[0\]", kimi, rows[1:]


@pytest.mark.parametrize(("why", "config", "lines"), list(broken()))
def test_what_does_not_fit_is_named(tmp_path: Path, why: str, config: dict[str, Any], lines: Any) -> None:
    with pytest.raises(ModelError, match=why):
        Tokenizer.load(put(tmp_path, config, lines=lines))


def test_one_file_is_needed(tmp_path: Path) -> None:
    put(tmp_path, {})
    put(tmp_path, {}, "b.tiktoken")
    with pytest.raises(ModelError, match="holds tiktoken.model, b.tiktoken; one tiktoken file is needed"):
        Tokenizer.load(tmp_path)
