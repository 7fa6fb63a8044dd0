"""How byte-level vocabularies cut text into words before they merge: the patterns, by their names in GGUF.

Facts, as the families' tokenizer.json files and the tables of GGUF's readers publish them. A text is cut by
each pattern in turn; what a pattern does not match stays a piece between its matches.
"""

from __future__ import annotations

from typing import NamedTuple

from bien.core.errors import ModelError, nearest

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _cased(tail: str, but: str = "") -> str:
    # Words that are cut where a capital follows a small letter; `but` takes a script out of both classes.
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return f"{lead}{upper}*{lower}+{tail}|{lead}{upper}+{lower}*{tail}"


def _llama(digits: str, words: str = _WORDS, signs: str = _SIGNS) -> str:
    return f"{_CONTRACTIONS}|{words}|{digits}|{signs}|{_ENDS}"


class PreTokenizer(NamedTuple):
    splits: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken as it is, whatever the merges would make
    bos: bool = False  # a bare text begins with BOS unless the file says otherwise
    nfc: bool = False  # characters are composed first


_LLAMA3 = PreTokenizer((_llama(r"\p{N}{1,3}"),), whole_words=True, bos=True)
_QWEN2 = PreTokenizer((_llama(_DIGIT),), nfc=True)
_GPT4O = PreTokenizer(
    (_cased(f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}",),
    whole_words=True,
)
_SMOLLM = PreTokenizer((_DIGIT, _GPT2))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer(
        (_llama(_DIGIT, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True
    ),
    "glm4": PreTokenizer(_LLAMA3.splits),
    "chatglm-bpe": PreTokenizer(_LLAMA3.splits),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}",
        )
    ),
    "kimi-k2": PreTokenizer(
        (
            r"[\p{Han}]+|"
            + _cased(f"{_CONTRACTIONS}?", r"&&[^\p{Han}]")
            + rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_ENDS}",
        ),
        whole_words=True,
    ),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": PreTokenizer(
        (_cased("") + rf"|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}",), whole_words=True
    ),
}


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """ModelError with the known names: a wrong one gives other tokens for the same text."""
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"{where}: pre-tokenizer {name!r} is unknown; {nearest(name, PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]
