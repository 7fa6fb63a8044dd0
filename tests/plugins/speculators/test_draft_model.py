"""A small model as a drafter: against the model itself over whole texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bien.core.api import Context, DeploymentError, ModelError
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.plugins.speculators import draft_model
from bien.plugins.speculators.draft_model import DraftModel, DraftModelConfig, check_vocabulary
from tests.core.executors.latent_models import SHAPE, draw
from tests.plugins.speculators.bench import WAYS, Bench, Target, feed, text

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_toy(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("small"), "qwen3", seed=3, hidden_size=32, **SMALL)


def make(target: Target, model: Path, **parameters: Any) -> DraftModel:
    (provider,) = draft_model.bien_providers()
    context = Context(architecture=target.architecture)
    made: DraftModel = provider.factory(DraftModelConfig(str(model), **parameters), context)
    return made


def check(target: Target, model: Path, way: str, **parameters: Any) -> None:
    alone = Target(model)
    bench = Bench(target, make(target, model, **parameters))
    tokens = text(4, 21)
    feed(bench, 1, tokens[:-1], way)
    draft, logits = bench.propose((1, 20, tokens[-1]))
    drafts = draft.tokens[0].tolist()
    assert draft.confidence is not None
    for i, found in enumerate(logits):
        hidden = alone.states([*tokens, *drafts[:i]])[-1]
        want = alone.model.head(hidden[-1:])[0]
        assert float((found[0] - want).abs().max()) <= 1e-4
        assert drafts[i] == int(want.argmax())
        assert float(draft.confidence[0, i]) == pytest.approx(float(torch.softmax(want, -1).max()), abs=1e-6)


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_however_the_text_came(target: Target, small: Path, way: str) -> None:
    check(target, small, way)


@torch.inference_mode()
def test_a_model_of_latents(target: Target, tmp_path: Path) -> None:
    write_toy(tmp_path)  # its tokenizer
    check(target, draw(tmp_path, "deepseek_v3", **{**SHAPE, "max_position_embeddings": 1024}), "chunks")


@torch.inference_mode()
def test_a_table_that_is_padded_otherwise(target: Target, tmp_path: Path) -> None:
    """Larger than the target's it is cut; smaller, the tokens behind it are never drafted."""
    for vocab in (320, 270):
        folder = write_toy(tmp_path / str(vocab), "qwen3", seed=vocab, vocab_size=vocab, **SMALL)
        bench = Bench(target, make(target, folder))
        bench.absorb((1, 0, text(6, 9)))
        draft, logits = bench.propose((1, 9, 7))
        assert {x.shape[1] for x in logits} == {min(vocab, 288)}
        assert int(draft.tokens.max()) < min(vocab, 288)


def test_what_it_promises(target: Target, small: Path) -> None:
    drawn, likeliest = make(target, small), make(target, small, sampled=False, max_drafts=2)
    assert (drawn.caps.deterministic, drawn.caps.q_kind, drawn.caps.lookahead) == (False, "dense", 0)
    assert (likeliest.caps.deterministic, likeliest.caps.q_kind, likeliest.caps.max_drafts) == (
        True,
        "onehot",
        2,
    )
    (group,) = drawn.groups(target.architecture, 4)
    assert (group.kind.value, group.layers, group.shardable) == ("draft", (0, 1), False)
    assert DraftModelConfig(str(small)).groups(target.architecture, 4) == (group,)


def test_another_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    folder = write_toy(tmp_path, **SMALL)
    check_vocabulary(str(folder), str(target.folder))
    path = folder / "tokenizer.json"
    whole = path.read_text()
    for change, problem in (
        (
            lambda words: words.update({"a": words["b"], "b": words["a"]}),
            "is .* for the drafter, the target calls",
        ),
        (lambda words: words.update({"new": 259}), "token 'new' is 259 .* the target has no such token"),
        (lambda words: words.pop("a"), "lacks 1 of the target's 259 tokens, such as 'a'"),
    ):
        tokenizer = json.loads(whole)
        change(tokenizer["model"]["vocab"])
        path.write_text(json.dumps(tokenizer))
        with pytest.raises(ModelError, match=problem):
            Bench(target, make(target, folder))


def test_a_model_that_caches_in_two_ways_is_refused(target: Target, tmp_path: Path) -> None:
    hybrid = write_tiny_hybrid(tmp_path / "hybrid")
    with pytest.raises(DeploymentError, match="caches in groups of kind .*state.*; needs one of full or"):
        make(target, hybrid).groups(target.architecture, 4)
    short = write_toy(tmp_path / "short", max_position_embeddings=512)
    with pytest.raises(DeploymentError, match="knows 512 positions, the target is served with 1024"):
        make(target, short).groups(target.architecture, 4)
