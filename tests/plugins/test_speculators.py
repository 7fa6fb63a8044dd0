from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.api import Context, DeploymentError, HostSpeculator
from bien.core.testing.speculator import HostSpeculatorSuite
from bien.plugins.speculators import prompt_lookup
from bien.plugins.speculators.prompt_lookup import PromptLookupConfig


def build(**parameters: int) -> HostSpeculator:
    (provider,) = prompt_lookup.bien_providers()
    drafter: HostSpeculator = provider.factory(
        msgspec.convert(parameters, PromptLookupConfig, strict=True), Context()
    )
    return drafter


class TestPromptLookup(HostSpeculatorSuite):
    def build(self) -> HostSpeculator:
        return build()


class TestPromptLookupOfSingleTokens(HostSpeculatorSuite):
    def build(self) -> HostSpeculator:
        return build(max_drafts=7, max_ngram=5, min_ngram=1)


def rescanned(tokens: list[int], limit: int, longest: int, shortest: int) -> list[int]:
    """The oracle: look from the end, longest n-gram first."""
    for n in range(longest, shortest - 1, -1):
        key = tokens[-n:]
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n : at] == key:
                out = list(tokens)
                for i in range(limit):
                    out.append(out[at + i])
                return out[len(tokens) :]
    return []


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12),
    st.integers(1, 2),
)
def test_equals_a_rescan(prompt: list[int], outputs: list[list[int]], shortest: int) -> None:
    drafter = build(min_ngram=shortest)
    drafter.start("a", prompt)
    text = list(prompt)
    for tokens in outputs:
        assert drafter.propose("a", 4) == rescanned(text, 4, 3, shortest)
        drafter.extend("a", tokens)
        text += tokens
    assert drafter.propose("a", 2) == rescanned(text, 2, 3, shortest)


def test_a_colliding_hash_is_no_occurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "_MULTIPLIER", 0)  # every n-gram has the same code
    drafter = build()
    drafter.start("a", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    assert drafter.propose("a", 4) == []


def test_a_long_prompt_is_indexed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(49152) for _ in range(20_000)]
    indexed: list[int] = []
    original = prompt_lookup._sorted_ngrams

    def counted(tokens: list[int], n: int) -> object:
        indexed.append(n)
        return original(tokens, n)

    monkeypatch.setattr(prompt_lookup, "_sorted_ngrams", counted)
    drafter = build()
    drafter.start("a", prompt)
    assert not indexed  # only a sequence that drafts pays for the index
    for token in prompt[1000:1100]:
        drafter.propose("a", 4)
        drafter.extend("a", [token])
    assert drafter.propose("a", 4) == prompt[1100:1104]
    assert sorted(indexed) == [2, 3]


def test_ngrams_that_cross() -> None:
    with pytest.raises(DeploymentError, match="min_ngram = 4 is larger than max_ngram = 3"):
        build(min_ngram=4)
    with pytest.raises(msgspec.ValidationError, match="max_drafts"):
        build(max_drafts=0)
