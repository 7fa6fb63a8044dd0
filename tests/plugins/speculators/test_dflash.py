"""Block drafters against the formulas, through chunks, prefix hits, rejected drafts, ragged batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bien.core.api import Context, DeviceSpeculator
from bien.core.executors.rows import Rows
from bien.core.testing.toy import write_toy
from bien.plugins.speculators import dflash
from bien.plugins.speculators.dflash.heads import Markov
from bien.plugins.speculators.dflash.network import BlockLayer
from tests.plugins.speculators.block_bench import BlockBench, Chosen, loaded
from tests.plugins.speculators.block_folders import (
    FULL,
    SLIDING,
    TARGET_LAYERS,
    deep_spec,
    second,
    spec_forge,
    speculators,
    write_drafter,
    z_lab,
)
from tests.plugins.speculators.block_oracle import Oracle

MIXED = {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 7, "use_sliding_window": True}
# name -> (speculator, config.json, parameters)
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", z_lab(), {}),
    "dflash, embedding": ("dflash", z_lab(target_layer_ids=[-1, 1]), {}),
    "dflash, causal": ("dflash", z_lab(causal=True), {}),
    "dflash, sliding": ("dflash", {**z_lab(), **MIXED}, {}),
    "dflash, sliding, not causal": ("dflash", {**z_lab(), **MIXED, "is_causal": False}, {}),
    "dflash, window": ("dflash", {**z_lab(), **MIXED}, {"window": 9}),
    "dflash, DeepSpec": ("dflash", deep_spec(markov_rank=0, enable_confidence_head=False), {}),
    "dflash, speculators": ("dflash", speculators("dflash"), {}),
    "dflash 2": ("dflash", second(output_multiplier=0.6, final_logit_softcapping=3.0), {}),
    "dflash 2, scaled": ("dflash", second(input_embedding_scale=1.7), {"max_drafts": 3}),
    "dspark": ("dspark", deep_spec(), {}),
    "dspark, gated": ("dspark", spec_forge(markov_head_type="gated"), {}),
    "dspark, recurrent": ("dspark", spec_forge(markov_head_type="rnn"), {}),
    "dspark, state alone": ("dspark", spec_forge(confidence_head_with_markov=False), {}),
    "dspark, no confidence": ("dspark", deep_spec(enable_confidence_head=False), {}),
    "dspark, speculators": ("dspark", speculators("dspark"), {}),
    "dspark, not from the anchor": ("dspark", speculators("dspark", sample_from_anchor=False), {}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_toy(folder, num_hidden_layers=TARGET_LAYERS, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return loaded(target)


def build(kind: str, folder: Path, **parameters: Any) -> DeviceSpeculator:
    provider = next(p for p in dflash.bien_providers() if p.name == kind)
    config = msgspec.convert({"path": str(folder), **parameters}, provider.config_type, strict=False)
    made: DeviceSpeculator = provider.factory(config, Context())
    return made


def words(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, length)]


def whole(bench: BlockBench, text: list[int]) -> None:
    bench.absorb([(1, 0, text[:-1])])


def chunks(bench: BlockBench, text: list[int]) -> None:
    bench.absorb([(1, 0, text[:5])])
    bench.absorb([(1, 5, text[5:6])])
    bench.absorb([(1, 6, text[6:-1])])


def prefix(bench: BlockBench, text: list[int]) -> None:
    bench.absorb([(3, 0, text[:8])])
    bench.share(3, 1, 8)
    bench.absorb([(1, 8, text[8:-1])])


def rejected(bench: BlockBench, text: list[int]) -> None:
    """Rounds of which one draft is taken, and two are not."""
    bench.absorb([(1, 0, text[:4])])
    for at in range(4, len(text) - 1, 2):
        bench.propose([(1, at, text[at])], [[0]] * 2)
        right = text[at : min(at + 2, len(text) - 1)]
        wrong = [(t + 1) % 250 for t in text[at + 2 : at + 4]]
        bench.absorb([(1, at, right + wrong)], [len(right)])


def ragged(bench: BlockBench, text: list[int]) -> None:
    bench.absorb([(0, 0, words(7, 30)), (1, 0, text[:9])])
    bench.absorb([(2, 0, words(8, 3)), (1, 9, text[9:-1]), (0, 30, words(9, 2))])


WAYS = (whole, chunks, prefix, rejected, ragged)
THOROUGH = ("dflash", "dflash, sliding", "dflash 2", "dspark, recurrent")


def check(bench: BlockBench, oracle: Oracle, window: int = 0, ways: Any = WAYS) -> None:
    """AssertionError unless laws and confidences of every draft are the formulas' own."""
    text, other = words(1, 20), words(2, 12)
    limit = bench.drafter.caps.max_drafts
    picks = [[(3 * k + 1) % 5, (2 * k + 2) % 5] for k in range(limit)]
    # The texts that are asked for together: one that came in all ways, and another one of another length.
    expected = {len(t): oracle.block(t, window) for t in (text, other)}
    for way in ways:
        way(bench, text)
        bench.absorb([(0, 0, other[:-1])])
        drafts, drawer = bench.propose([(1, 19, text[-1]), (0, 11, other[-1])], picks)
        assert drafts.tokens.tolist() == [list(t) for t in zip(*drawer.tokens, strict=True)]
        for i, known in enumerate((text, other)):
            taken = [tokens[i] for tokens in drawer.tokens]
            laws, chances = oracle.walk(known, expected[len(known)], taken)
            for k, (found, law) in enumerate(zip(drawer.laws, laws, strict=True)):
                where = f"{way.__name__}, text {i}, draft {k}"
                assert found[i].keys() == law.keys(), f"{where}: other candidates"
                worst = max(abs(found[i][t] - law[t]) for t in law)
                assert worst < 1e-4, f"{where}: a score is off by {worst}"
            assert drafts.confidence is not None
            assert np.allclose(drafts.confidence[i], chances, atol=1e-4), f"{way.__name__}: confidences"


def bench_of(name: str, tmp_path: Path, target: Path, model: Any) -> tuple[BlockBench, Oracle, int]:
    kind, config, parameters = FORMS[name]
    folder = write_drafter(tmp_path / "drafter", config)
    bench = BlockBench(build(kind, folder, **parameters), *model)
    return bench, Oracle(folder, target), parameters.get("window", 0)


@pytest.mark.parametrize("name", FORMS)
def test_equals_the_formulas(name: str, tmp_path: Path, target: Path, model: Any) -> None:
    bench, oracle, window = bench_of(name, tmp_path, target, model)
    check(bench, oracle, window, WAYS if name in THOROUGH else (rejected, ragged))


def test_behind_one_token(tmp_path: Path, target: Path, model: Any) -> None:
    """Nothing is known but the first token: there is no context."""
    bench, oracle, _ = bench_of("dspark", tmp_path, target, model)
    _, drawer = bench.propose([(2, 0, 77)], [[4], [2]])
    laws, _ = oracle.walk([77], oracle.block([77]), [tokens[0] for tokens in drawer.tokens])
    for found, law in zip(drawer.laws, laws, strict=True):
        assert max(abs(found[0][t] - law[t]) for t in law) < 1e-4


def test_fewer_drafts_are_the_first_ones(tmp_path: Path, target: Path, model: Any) -> None:
    bench, _, _ = bench_of("dspark", tmp_path, target, model)
    whole(bench, words(1, 20))
    all_six, two = (bench.propose([(1, 19, 9)], [[1]] * limit)[1].laws for limit in (6, 2))
    assert len(two) == 2
    for (more,), (less,) in zip(all_six[:2], two, strict=True):
        assert max(abs(more[t] - less[t]) for t in less) < 1e-9


def test_a_block_leaves_nothing_behind(tmp_path: Path, target: Path, model: Any) -> None:
    bench, _, _ = bench_of("dflash", tmp_path, target, model)
    whole(bench, words(1, 20))
    before = [pool.data.clone() for pool in bench.pools]
    bench.propose([(1, 19, 9)], [[0]] * 5)
    assert all(torch.equal(a, pool.data) for a, pool in zip(before, bench.pools, strict=True))


def test_confidences_do_not_know_the_draft(tmp_path: Path, target: Path, model: Any) -> None:
    for name in ("dflash", "dflash 2", "dspark", "dspark, recurrent", "dspark, no confidence"):
        bench, _, _ = bench_of(name, tmp_path, target, model)
        whole(bench, words(1, 20))
        blind(bench)


def blind(bench: BlockBench) -> None:
    """AssertionError if a confidence depends on its own draft, or on a later one."""
    limit = bench.drafter.caps.max_drafts
    usual, _ = bench.propose([(1, 19, 9)], [[0]] * limit)
    for k in range(limit):
        picks = [[4 if j == k else 0] for j in range(limit)]
        other, _ = bench.propose([(1, 19, 9)], picks)
        assert usual.confidence is not None and other.confidence is not None
        assert torch.equal(usual.confidence[:, : k + 1], other.confidence[:, : k + 1])


# -- planted faults


def _inputs(bench: BlockBench, patch: pytest.MonkeyPatch) -> None:
    caps = bench.drafter.caps
    bench.drafter.caps = msgspec.structs.replace(caps, taps=tuple((i, "in") for i, _ in caps.taps))


def _own_position(bench: BlockBench, patch: pytest.MonkeyPatch) -> None:
    attend = Rows.attend_block

    def further(rows: Rows, *given: Any) -> Any:
        later = rows.next()
        later.layers = rows.layers
        return attend(later, *given)

    patch.setattr(Rows, "attend_block", further)


def _causal(bench: BlockBench, patch: pytest.MonkeyPatch) -> None:
    call = BlockLayer.__call__

    def causal(layer: BlockLayer, *given: Any) -> Any:
        layer.causal = True
        return call(layer, *given)

    patch.setattr(BlockLayer, "__call__", causal)


def _other_mask(bench: BlockBench, patch: pytest.MonkeyPatch) -> None:
    form = bench.drafter._form  # type: ignore[attr-defined]
    bench.drafter._form = dataclasses.replace(form, mask=form.mask + 1)  # type: ignore[attr-defined]


def _token_before(bench: BlockBench, patch: pytest.MonkeyPatch) -> None:
    step, seen = Markov.step, []

    def late(head: Markov, before: Any, hidden: Any, state: Any) -> Any:
        seen.append(before)
        return step(head, seen[-2:][0], hidden, state)

    patch.setattr(Markov, "step", late)


def _own_token(bench: BlockBench, patch: pytest.MonkeyPatch) -> None:
    """The confidence of a draft is made once it is drawn, of its own token."""
    chance, draw = bench.drafter._chance, Chosen.draw  # type: ignore[attr-defined]
    waiting: list[Any] = []

    def later(k: int, before: Any, hidden: Any, scores: Any) -> Any:
        waiting.append((k, hidden, scores, made := torch.zeros(len(hidden))))
        return made

    def draw_and_tell(drawer: Chosen, *given: Any) -> Any:
        token = draw(drawer, *given)
        k, hidden, scores, made = waiting.pop()
        made.copy_(chance(k, token, hidden, scores))
        return token

    patch.setattr(bench.drafter, "_chance", later)
    patch.setattr(Chosen, "draw", draw_and_tell)


FAULTS: dict[str, Callable[[BlockBench, pytest.MonkeyPatch], None]] = {
    "layer input instead of output": _inputs,
    "context of the anchor's own position": _own_position,
    "causal block": _causal,
    "another mask token": _other_mask,
    "Markov bias by the token before the one before": _token_before,
    "confidence that sees its own token": _own_token,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: str, tmp_path: Path, target: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, oracle, _ = bench_of("dspark", tmp_path, target, model)
    check(bench, oracle, ways=(whole,))
    FAULTS[fault](bench, monkeypatch)
    with pytest.raises(AssertionError, match=r"off by|confidences"):
        check(bench, oracle, ways=(whole,))
    if fault == "confidence that sees its own token":
        with pytest.raises(AssertionError):
            blind(bench)
