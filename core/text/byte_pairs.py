"""Byte-level BPE as an object of the `tokenizers` library, out of what other formats hold of one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from bien.core.errors import ModelError
from bien.core.text.patterns import PreTokenizer

Merges = list[tuple[str, str]]


class Added(NamedTuple):
    """A token that is found in text before anything is merged."""

    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def spelled(ranks: Mapping[bytes, int]) -> dict[str, int]:
    """A vocabulary of bytes in the alphabet that the library's merges are written in."""
    letters = {b: c for c, b in byte_alphabet().items()}
    return {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}


def merges_of(vocab: Mapping[str, int]) -> Merges:
    """The merges of a vocabulary whose ids are ranks (tiktoken): of all pairs of neighbours the one whose
    union has the lowest rank is merged first, so every way to part a token is a merge of its rank."""
    found = []
    for token, rank in vocab.items():
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                found.append((rank, left, right, token[:at], token[at:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def byte_pairs(
    vocab: Mapping[str, int],
    merges: Merges,
    pre: PreTokenizer,
    added: Mapping[int, Added],
    *,
    where: str,
    bos: str | None = None,
) -> Library:
    """`vocab` and `merges` in the byte alphabet; `added` by id: within `vocab`, or behind it without a gap.
    `bos`: what a bare text begins with. ModelError naming `where` for what does not fit together."""
    try:
        library = Library(models.BPE(dict(vocab), merges, fuse_unk=False, ignore_merges=pre.whole_words))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{where}: vocabulary and merges do not fit together: {error}") from error
    if pre.nfc:
        library.normalizer = normalizers.NFC()
    try:
        cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.splits]
    except Exception as error:
        raise ModelError(f"{where}: its text cannot be cut by {pre.splits}: {error}") from error
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(t.text, **_flags(t)) for _, t in sorted(added.items())])
    for id, token in sorted(added.items()):
        found = library.token_to_id(token.text)
        if found != id:
            raise ModelError(
                f"{where}: added token {token.text!r} has id {id}, and would get {found}; ids of added "
                "tokens follow the vocabulary without a gap, each text once"
            )
    if bos is not None:
        begin = library.token_to_id(bos)
        if begin is None:
            raise ModelError(f"{where}: bos_token {bos!r} is no token of its vocabulary")
        library.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, begin)])
    return library


def fill(added: Mapping[int, Added], start: int, count: int, name: str) -> dict[int, Added]:
    """`added` and, where ids between `start` and the last of them (at least `count` ids) have no token, one
    that is called `name` with "{}" for the id."""
    end = max([start + count, *(id + 1 for id in added)])
    return {**{i: Added(name.format(i)) for i in range(start, end)}, **added}


def decoder_row(row: Mapping[str, object]) -> Added:
    """An entry of `added_tokens_decoder` in tokenizer_config.json."""
    flags = {name: bool(row.get(name, False)) for name in Added._fields[1:]}
    return Added(str(row["content"]), **flags)


def _flags(token: Added) -> dict[str, bool]:
    return {name: value for name, value in token._asdict().items() if name != "text"}
