"""Layers for further tokens as a drafter: against the papers' formulas and against whole sequences without a
cache (that a layer computes what transformers' does is tested beside the core's `MultiTokenPrediction`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bien.core.api import Context, DeploymentError, GroupKind, ModelError
from bien.core.architectures.deepseek import drafting_groups
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.plan import i32
from bien.core.testing.toy import toy_config, write_toy
from bien.plugins.speculators import _network, mtp
from bien.plugins.speculators.mtp import Mtp, MtpConfig
from bien.plugins.speculators.mtp import network as mtp_network
from bien.plugins.speculators.mtp.form import read_form
from tests.core.executors.latent_models import INDEXER, SHAPE
from tests.plugins.speculators import oracle
from tests.plugins.speculators.bench import BLOCK, CPU, DTYPE, WAYS, Bench, Target, feed, text
from tests.plugins.speculators.folders import write_mtp, write_predicting

LATENT = {"hidden_act": "silu", **SHAPE, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "glm-4.7": toy_config("glm4_moe", num_hidden_layers=2),
    "glm-4.7 of two": toy_config("glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=2),
    "deepseek-v3": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, **LATENT},
    "deepseek-v3 of three": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 3, **LATENT},
    "glm-5": {
        "model_type": "glm_moe_dsa",
        "num_nextn_predict_layers": 1,
        **LATENT,
        **INDEXER,
        "indexer_types": ["full", "shared"],
    },
}
# Every way of every kind is slow.
CASES = [
    pytest.param(kind, way, marks=() if way == "drafts" or kind == "glm-4.7" else pytest.mark.slow)
    for kind in KINDS
    for way in WAYS
]
NAMES = {
    "speculators": (
        "mtp_layers.0.",
        *(
            f"mtp_layers.0.{n}"
            for n in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        ),
    ),
    "qwen": ("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
}


def make(target: Target, **parameters: Any) -> Mtp:
    (provider,) = mtp.bien_providers()
    context = Context(architecture=target.architecture)
    made: Mtp = provider.factory(MtpConfig(**parameters), context)
    return made


def near(found: Tensor, want: Tensor) -> None:
    assert found.shape == want.shape, (found.shape, want.shape)
    assert float((found - want).abs().max()) <= 1e-4, "other logits than those of the whole text"


# -- the target's own layers


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    made: dict[str, Target] = {}

    class Lazily(dict[str, Target]):
        def __missing__(self, kind: str) -> Target:
            self[kind] = Target(write_predicting(tmp_path_factory.mktemp("target"), KINDS[kind]))
            return self[kind]

    return Lazily(made)


def through(target: Target, module: Any, states: Tensor, tokens: list[int]) -> Tensor:
    """A module over pairs of states and tokens from position 0 on, in pools of their own."""
    groups = drafting_groups(target.architecture)
    blocks = -(-len(tokens) // BLOCK)
    pools = tuple(Pool.allocate(g, blocks, CPU) for g in groups)
    tables = tuple(np.arange(1, blocks + 1, dtype=np.int32)[None] for _ in groups)
    rows = Rows(pools, tables, i32([0]), i32([0]), i32([len(tokens)]), i32([0]), target.kernels, CPU)
    named = {g.name: i for i, g in enumerate(target.architecture.groups)}
    out: Tensor = module(states, torch.tensor(tokens), rows.redirect(0, **named))
    return out


def expected(target: Target, tokens: list[int], drafts: list[int]) -> list[Tensor]:
    modules = target.drafter_parts().load_predicting()
    states, logits = modules[0].first_state(target.states(tokens[:-1])[-1]), []
    if len(modules) == 1:
        for step in range(len(drafts) + 1):
            out = through(target, modules[0], states, [*tokens[1:], *drafts[:step]])
            logits.append(modules[0].head(out[-1:])[0])
            states = torch.cat([states, out[-1:]])
        return logits
    for depth, module in enumerate(modules[: len(drafts) + 1], 1):
        # h^k at i: of h^(k-1) at i, and the token at i + k.
        states = through(target, module, states, [*tokens, *drafts][depth : depth + len(states)])
        logits.append(module.head(states[-1:])[0])
    return logits


def check(target: Target, way: str, count: int) -> None:
    bench = Bench(target, make(target, max_drafts=count))
    for slot, length in ((1, 22), (2, 2)):
        if way == "ragged" and length < 4:
            continue
        tokens = text(length, length)
        feed(bench, slot, tokens[:-1], way)
        draft, logits = bench.propose((slot, length - 1, tokens[-1]))
        drafts = draft.tokens[0].tolist()
        want = expected(target, tokens, drafts[:-1])
        for i, (found, right) in enumerate(zip(logits, want, strict=True)):
            near(found[0], right)
            assert drafts[i] == int(right.argmax())
            assert draft.confidence is not None
            near(draft.confidence[0, i], torch.softmax(right, -1).max())


@pytest.mark.parametrize(("kind", "way"), CASES)
@torch.inference_mode()
def test_however_the_text_came(targets: dict[str, Target], kind: str, way: str) -> None:
    check(targets[kind], way, KINDS[kind]["num_nextn_predict_layers"] if "of" in kind else 3)


def shifted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_network, "shifted", lambda states, before, rows: states)


def first_position(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rows.redirect
    monkeypatch.setattr(Rows, "redirect", lambda self, group, skip=0, **named: right(self, group, **named))


def boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rows.load_boundary
    monkeypatch.setattr(Rows, "load_boundary", lambda self, group: torch.zeros_like(right(self, group)))


@pytest.mark.parametrize("plant", [shifted_tokens, first_position, boundary])
@pytest.mark.parametrize("kind", ["glm-4.7", "glm-5"])
@torch.inference_mode()
def test_a_trap_is_noticed(
    targets: dict[str, Target], kind: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets[kind]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="other logits"):
        check(target, "chunks", 3)


def test_entries_lie_as_the_targets_do(targets: dict[str, Target]) -> None:
    a = targets["glm-5"].architecture
    own = make(targets["glm-5"]).groups(a, BLOCK)
    assert [g.name for g in own] == ["mtp-latent", "mtp-indexer", "mtp-state-0"]
    assert {g.kind for g in own} == {GroupKind.DRAFT}
    assert own == MtpConfig().groups(a, BLOCK)


def test_a_target_without_such_layers_is_refused(tmp_path: Path, targets: dict[str, Target]) -> None:
    target = Target(write_toy(tmp_path))
    with pytest.raises(DeploymentError, match=r"\(llama\) has no layers for further tokens"):
        make(target)
    with pytest.raises(DeploymentError, match="max_drafts = 4, .* has 3 layers .* valid: 1 to 3"):
        make(targets["deepseek-v3 of three"], max_drafts=4)


# -- a folder with a layer of its own


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_toy(tmp_path_factory.mktemp("plain"), tie_word_embeddings=False))


def check_folder(plain: Target, folder: Path, way: str = "whole") -> None:
    names = NAMES["qwen" if read_form(folder).names.merge == "mtp.fc" else "speculators"]
    config = json.loads((folder / "config.json").read_text())
    config = config.get("transformer_layer_config", config)
    tensors = {n: t.to(DTYPE) for n, t in load_file(folder / "model.safetensors").items()}
    bench = Bench(plain, make(plain, path=str(folder), max_drafts=4))
    tokens = text(5, 23)
    feed(bench, 1, tokens[:-1], way)
    draft, logits = bench.propose((1, 22, tokens[-1]))
    states = plain.model.normed(plain.states(tokens[:-1])[-1])
    drafts = draft.tokens[0, :-1].tolist()
    model = plain.model
    want = oracle.mtp(tensors, config, names, model.embed, model.project, states, tokens, drafts)
    for found, right in zip(logits, want, strict=True):
        near(found[0], right)


@pytest.mark.parametrize(("names", "changes"), [("speculators", {}), ("qwen", {"attention_bias": True})])
@torch.inference_mode()
def test_a_folder_of_its_own(plain: Target, tmp_path: Path, names: str, changes: Any) -> None:
    folder = write_mtp(tmp_path, names, **changes)
    for way in WAYS:
        check_folder(plain, folder, way)


def concatenation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swapped:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def cat(parts: list[Tensor], dim: int) -> Tensor:
            return torch.cat(parts[::-1], dim)

    monkeypatch.setattr(mtp_network, "torch", Swapped())


def feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before the final norm goes to the next draft."""
    right, norm = mtp_network.Module.__call__, mtp_network.Module._rms

    def bare(self: Any, state: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        self._rms = lambda x, weight: x if weight is self._final_norm else norm(self, x, weight)
        out = right(self, state, tokens, rows)
        del self._rms
        return out

    def head(self: Any, state: Tensor) -> Tensor:
        return self._target.project(self._rms(state, self._final_norm))  # type: ignore[no-any-return]

    monkeypatch.setattr(mtp_network.Module, "__call__", bare)
    monkeypatch.setattr(mtp_network.Module, "head", head)


def bare_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_network.Module, "first_state", lambda self, hidden: hidden)


@pytest.mark.parametrize("plant", [concatenation, feedback, bare_state, shifted_tokens, first_position])
@torch.inference_mode()
def test_a_trap_of_a_folder_is_noticed(
    plain: Target, tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_mtp(tmp_path)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="other logits"):
        check_folder(plain, folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3'; expected a folder of speculators"),
        ({"transformer_layer_config": None}, "'mtp'; expected a folder"),
        ({"transformer_layer_config": {"model_type": "qwen3_next"}}, "model_type = 'qwen3_next'; expected"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, changes: Any, problem: str) -> None:
    folder = write_mtp(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=problem):
        read_form(folder)


def test_another_targets_layer_is_refused(plain: Target, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, hidden_size=64)
    with pytest.raises(DeploymentError, match="hidden states of 64 features"):
        make(plain, path=str(folder)).groups(plain.architecture, BLOCK)
