from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.api import (
    Context,
    DeploymentError,
    DeviceSpeculator,
    Draft,
    HostSpeculator,
    SamplingParams,
    Scope,
)
from bien.core.architectures.registry import read_architecture
from bien.core.testing.device_speculator import DeviceSpeculatorSuite
from bien.core.testing.speculator import HostSpeculatorSuite
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.speculators import early_exit, prompt_lookup
from bien.plugins.speculators.early_exit import EarlyExitConfig
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
    drafter.start("a", prompt, Scope())
    text = list(prompt)
    for tokens in outputs:
        assert drafter.propose("a", 4).tokens == rescanned(text, 4, 3, shortest)
        drafter.extend("a", tokens)
        text += tokens
    assert drafter.propose("a", 2).tokens == rescanned(text, 2, 3, shortest)


def test_a_colliding_hash_is_no_occurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "_MULTIPLIER", 0)  # every n-gram has the same code
    drafter = build()
    drafter.start("a", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], Scope())
    assert drafter.propose("a", 4) == Draft()


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
    drafter.start("a", prompt, Scope())
    assert not indexed  # only a sequence that drafts pays for the index
    for token in prompt[1000:1100]:
        drafter.propose("a", 4)
        drafter.extend("a", [token])
    assert drafter.propose("a", 4).tokens == prompt[1100:1104]
    assert sorted(indexed) == [2, 3]


def test_ngrams_that_cross() -> None:
    with pytest.raises(DeploymentError, match="min_ngram = 4 is larger than max_ngram = 3"):
        build(min_ngram=4)
    with pytest.raises(msgspec.ValidationError, match="max_drafts"):
        build(max_drafts=0)


# -- early exit


def exit_after(layers: int, max_drafts: int = 3) -> DeviceSpeculator:
    (provider,) = early_exit.bien_providers()
    config = msgspec.convert({"layers": layers, "max_drafts": max_drafts}, EarlyExitConfig)
    drafter: DeviceSpeculator = provider.factory(config, Context())
    return drafter


class TestEarlyExit(DeviceSpeculatorSuite):
    def build(self) -> DeviceSpeculator:
        return exit_after(2)


class TestEarlyExitOfQwen(DeviceSpeculatorSuite):
    def build(self) -> DeviceSpeculator:
        return exit_after(3, max_drafts=2)

    def target(self, folder: Path) -> Path:
        return write_toy(folder, "qwen3", num_hidden_layers=self.layers)


LAYERS = 3


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(
        tmp_path_factory.mktemp(request.param),
        request.param,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=False,
    )


def engine(folder: Path, speculator: Any, budget: int = 512, **options: Any) -> TorchHarness:
    parts = {"quantizer": NoQuantizer(), "parallel": Single(), "speculator": speculator}
    return TorchHarness(folder, Fcfs(FcfsConfig(token_budget=budget)), parts, **options)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def turns(h: TorchHarness, seed: int) -> dict[str, list[int]]:
    """Three prompts at once, then a second turn of each over its cached prefix."""
    for i, n in enumerate((41, 6, 27)):
        h.submit(f"r{i}", text(seed + i, n), max_tokens=17 + i)
    h.run()
    first = {id: list(tokens) for id, tokens in h.tokens.items()}
    for i, n in enumerate((41, 6, 27)):
        h.submit(f"s{i}", text(seed + i, n) + first[f"r{i}"] + text(seed + 9, 5), max_tokens=12)
    h.run()
    return h.tokens


@pytest.mark.parametrize(
    ("budget", "blocks"), [(512, 64), (19, 64), (512, 12)], ids=["", "chunks", "short of KV"]
)
def test_text_is_the_targets_own(folder: Path, budget: int, blocks: int) -> None:
    plain = turns(engine(folder, None), 70)
    h = engine(folder, exit_after(2), budget, blocks=blocks)
    assert turns(h, 70) == plain
    stats = h.engine.stats()
    assert stats.drafted > stats.accepted
    assert (stats.preemptions > 0) is (blocks == 12)


@pytest.mark.parametrize(
    ("budget", "blocks"), [(512, 64), (19, 64), (512, 12)], ids=["", "chunks", "short of KV"]
)
def test_a_drafter_of_all_layers_is_always_right(folder: Path, budget: int, blocks: int) -> None:
    """Its keys and values are the target's only if chunks, prefix hits, preemptions, verified drafts and
    batches of unequal drafts have all filled them rightly; then every draft is accepted."""
    h = engine(folder, exit_after(LAYERS), budget, blocks=blocks)
    turns(h, 80)
    assert h.cached["s0"] > 40 or blocks == 12
    stats = h.engine.stats()
    assert stats.drafted > 50
    assert stats.accepted == stats.drafted
    assert (stats.preemptions > 0) is (blocks == 12)


def test_sampled_text_is_the_same_with_any_drafter(folder: Path) -> None:
    """Same seed, same text: a token depends on its position's number, not on who drafted."""
    sampling = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=77, ignore_eos=True)
    found = []
    for drafter in (None, exit_after(1), exit_after(LAYERS, 2), build(min_ngram=1)):
        h = engine(folder, drafter)
        h.submit("a", text(90, 30), sampling=sampling)
        h.submit("b", text(91, 9), sampling=sampling)
        h.run()
        found.append(h.tokens)
    assert found[0]["a"] != found[0]["b"]
    for other in found[1:]:
        assert other == found[0]


def test_drafter_deeper_than_the_target(folder: Path) -> None:
    a = read_architecture(folder, 16, "float32")
    with pytest.raises(DeploymentError, match=r"layers = 4, but of the 3 layers .* valid: 1 to 3"):
        exit_after(4).groups(a, 16)


def test_drafter_of_a_hybrid(tmp_path: Path) -> None:
    a = read_architecture(write_tiny_hybrid(tmp_path), 16, "float32")
    with pytest.raises(
        DeploymentError, match="only the first 0 can draft: the others are not full attention"
    ):
        exit_after(1).groups(a, 16)


def test_draft_group_weighs_what_its_layers_weigh(folder: Path) -> None:
    a = read_architecture(folder, 16, "float32")
    (group,) = exit_after(2).groups(a, 16)
    assert group.bytes_per_token * LAYERS == a.groups[0].bytes_per_token * 2
    assert (group.layers, group.dtype) == ((0, 1), "float32")
