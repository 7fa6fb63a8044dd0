"""Speculator "prompt-lookup": drafts are what followed the last tokens where they occurred before.

Saxena, "Prompt lookup decoding" (2023), the n-gram drafter of other engines. Agents quote files and
repeat calls, so that copies are long. The longest n-gram wins, then its latest occurrence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.api import (
    Architecture,
    Context,
    DeploymentError,
    Draft,
    KVGroup,
    Provider,
    Scope,
    SpeculatorCaps,
    hookimpl,
)

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MASK = 2**64 - 1
_POSITION_BITS = 24  # of a sorted entry; the other 40 hold the n-gram's hash


class PromptLookupConfig(msgspec.Struct, forbid_unknown_fields=True):
    max_drafts: Annotated[int, msgspec.Meta(ge=1)] = 4
    max_ngram: Annotated[int, msgspec.Meta(ge=1)] = 3
    min_ngram: Annotated[int, msgspec.Meta(ge=1)] = 2

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return ()


class _Text:
    """The tokens of one sequence and where its n-grams occurred last.

    The prompt's n-grams lie in one sorted array per n, built by the first lookup that needs it (0.1 s for
    a dictionary of 100k tokens, 2 ms for the array); those that output tokens complete lie in a dictionary.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self.prompt = min(len(tokens), 2**_POSITION_BITS)
        self.indexed = self.prompt
        self.sorted: dict[int, NDArray[np.uint64]] = {}
        self.latest: dict[tuple[int, ...], int] = {}

    def find(self, n: int) -> int:
        """The position after the latest earlier occurrence of the last n tokens; -1: none."""
        if len(self.tokens) <= n:
            return -1
        key = tuple(self.tokens[-n:])
        at = self.latest.get(key, -1)
        return at if at >= 0 else self._find_in_prompt(key)

    def index(self, shortest: int, longest: int) -> None:
        """Take the tokens that came since the last call into the dictionary. An n-gram enters once the
        token after it is known, so that the end of the text never finds itself."""
        tokens = self.tokens
        for at in range(self.indexed, len(tokens)):
            for n in range(shortest, min(longest, at) + 1):
                self.latest[tuple(tokens[at - n : at])] = at
        self.indexed = len(tokens)

    def _find_in_prompt(self, key: tuple[int, ...]) -> int:
        n = len(key)
        entries = self.sorted.get(n)
        if entries is None:
            entries = self.sorted[n] = _sorted_ngrams(self.tokens[: self.prompt], n)
        code = _hash(key) >> _POSITION_BITS
        found = int(np.searchsorted(entries, np.uint64(((code + 1) << _POSITION_BITS) - 1), side="right")) - 1
        if found < 0 or int(entries[found]) >> _POSITION_BITS != code:
            return -1
        at = int(entries[found]) & (2**_POSITION_BITS - 1)
        return at if tuple(self.tokens[at - n : at]) == key else -1  # 40 bits may collide


class PromptLookup:
    def __init__(self, config: PromptLookupConfig) -> None:
        self.caps = SpeculatorCaps(place="host", max_drafts=config.max_drafts)
        self._config = config
        self._texts: dict[str, _Text] = {}

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        self._texts[id] = _Text(tokens)

    def extend(self, id: str, tokens: list[int]) -> None:
        self._texts[id].tokens += tokens

    def propose(self, id: str, limit: int) -> Draft:
        text = self._texts[id]
        limit = min(limit, self.caps.max_drafts)
        shortest, longest = self._config.min_ngram, self._config.max_ngram
        text.index(shortest, longest)
        for n in range(longest, shortest - 1, -1):
            at = text.find(n)
            if at >= 0:
                return Draft(_copy(text.tokens, at, limit))
        return Draft()

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        pass

    def end(self, id: str) -> None:
        self._texts.pop(id, None)

    def close(self) -> None:
        self._texts.clear()


def _copy(tokens: list[int], at: int, limit: int) -> list[int]:
    # A copy may run into itself: a text that repeats a short period goes on repeating it.
    period = len(tokens) - at
    return [tokens[at + i % period] for i in range(max(0, limit))]


def _hash(key: tuple[int, ...]) -> int:
    code = 0
    for token in key:
        code = ((code ^ token) * _MULTIPLIER) & _MASK
        code ^= code >> 29
    return code


def _sorted_ngrams(tokens: list[int], n: int) -> NDArray[np.uint64]:
    # The n-gram before position i, for i = n .., as hash << 24 | i: sorted, the last of a hash is the latest.
    ids = np.array(tokens, np.uint64)
    count = max(0, len(ids) - n)
    code = np.zeros(count, np.uint64)
    for j in range(n):
        code = (code ^ ids[j : j + count]) * np.uint64(_MULTIPLIER)
        code ^= code >> np.uint64(29)
    position = np.arange(n, n + count, dtype=np.uint64)
    shift = np.uint64(_POSITION_BITS)
    return np.sort((code >> shift << shift) | position)


def _make(config: PromptLookupConfig, ctx: Context) -> PromptLookup:
    if config.min_ngram > config.max_ngram:
        raise DeploymentError(
            f"prompt-lookup: min_ngram = {config.min_ngram} is larger than max_ngram = {config.max_ngram}",
            field="min_ngram",
        )
    return PromptLookup(config)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            "prompt-lookup",
            _make,
            PromptLookupConfig,
            summary="copies what followed the last n tokens earlier in prompt and output (host)",
        )
    ]
