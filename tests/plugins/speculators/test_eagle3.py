"""EAGLE-3 against its paper's formulas: formats, flags, ways in which a text comes, trees; planted traps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import Context, DeploymentError, ModelError
from bien.core.testing.toy import write_toy
from bien.plugins.speculators import _network, eagle3
from bien.plugins.speculators.eagle3 import Eagle3, Eagle3Config
from bien.plugins.speculators.eagle3 import network as eagle3_network
from bien.plugins.speculators.eagle3.form import Form, read_form
from tests.plugins.speculators import oracle
from tests.plugins.speculators.bench import DTYPE, WAYS, Bench, Target, feed, text
from tests.plugins.speculators.folders import FORMATS, eagle3_config, eagle3_tensors, write, write_eagle3

LAYERS = 6  # so that 2, L // 2 and L - 3 are not all the same
FLAGS: dict[str, dict[str, Any]] = {
    "": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "gpt-oss": {"norm_before_fc": True, "norm_before_residual": True},
    "whole vocabulary": {"draft_vocab_size": 288, "attention_bias": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    return Target(write_toy(folder, num_hidden_layers=LAYERS, tie_word_embeddings=False))


class Judge:
    """What the oracle says of one drafter's folder behind one target."""

    def __init__(self, target: Target, folder: Path, entering: tuple[int, ...]) -> None:
        self.form, self.target, self.entering = read_form(folder), target, entering
        import json

        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {
            n: t.to(DTYPE) if t.is_floating_point() else t
            for n, t in load_file(folder / "model.safetensors").items()
        }
        offsets = self.tensors.get("d2t")
        count = self.config["draft_vocab_size"]
        self.ids = [i + (0 if offsets is None else int(offsets[i])) for i in range(count)]

    def embed(self, tokens: Tensor) -> Tensor:
        table = self.tensors.get("embed_tokens.weight")
        return self.target.model.embed(tokens) if table is None else F.embedding(tokens, table)

    def logits(self, tokens: list[int], drafts: list[int]) -> list[Tensor]:
        """Behind tokens (the last of them not computed), and behind every draft."""
        states = self.target.states(tokens[:-1])
        aux = [states[i] for i in self.entering]
        return oracle.eagle3(self.tensors, self.config, self.embed, aux, tokens, drafts)


def make(folder: Path, target: Target, **parameters: Any) -> Eagle3:
    config = Eagle3Config(str(folder), **parameters)
    (provider,) = eagle3.bien_providers()
    made: Eagle3 = provider.factory(config, Context(architecture=target.architecture))
    return made


def near(found: Tensor, want: Tensor) -> None:
    assert found.shape == want.shape, (found.shape, want.shape)
    assert float((found - want).abs().max()) <= 1e-4, "other logits than the paper's"


def check(
    target: Target, folder: Path, entering: tuple[int, ...], ways: tuple[str, ...] = ("whole",)
) -> None:
    """Chains of four drafts after texts that came in these ways."""
    judge = Judge(target, folder, entering)
    for way in ways:
        bench = Bench(target, make(folder, target))
        for slot, length in ((1, 22), (2, 2)):
            if way == "ragged" and length < 4:
                continue
            tokens = text(length, length)
            feed(bench, slot, tokens[:-1], way)
            last = tokens[-1]
            draft, logits = bench.propose((slot, length - 1, last))
            drafts = draft.tokens[0].tolist()
            want = judge.logits(tokens, drafts[:-1])
            for i, (found, right) in enumerate(zip(logits, want, strict=True)):
                near(found[0], right)
                assert drafts[i] == judge.ids[int(right.argmax())], f"{way}: draft {i} is {drafts}"
                assert draft.confidence is not None
                near(draft.confidence[0, i], torch.softmax(right, -1).max())


USUAL = (2, LAYERS // 2, LAYERS - 3)


@pytest.mark.parametrize("flags", FLAGS)
@torch.inference_mode()
def test_is_the_papers_network(target: Target, tmp_path: Path, flags: str) -> None:
    check(target, write_eagle3(tmp_path, "specforge", **FLAGS[flags]), USUAL)


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_however_the_text_came(target: Target, tmp_path: Path, way: str) -> None:
    check(target, write_eagle3(tmp_path), USUAL, (way,))


@pytest.mark.parametrize("maker", FORMATS)
@torch.inference_mode()
def test_formats_of_all_makers(target: Target, tmp_path: Path, maker: str) -> None:
    """With other taps than the usual ones, which each counts in its own way."""
    changes: dict[str, Any] = {}
    name, entering = "eagle_aux_hidden_state_layer_ids", USUAL
    if maker == "specforge":
        changes, entering = {"eagle_config": {name: [0, 3]}}, (1, 4)
    elif maker == "speculators":
        changes, entering = {name: [0, 3, 4, 5], "model_type": "qwen3"}, (0, 3, 4, 5)
    folder = write_eagle3(tmp_path, maker, states=len(entering), **changes)
    assert read_form(folder).maker == maker
    check(target, folder, entering)


@torch.inference_mode()
def test_another_width_than_the_targets(target: Target, tmp_path: Path) -> None:
    check(target, write_eagle3(tmp_path, hidden_size=36, target_hidden_size=48), USUAL)


@torch.inference_mode()
def test_pickled_weights_are_read(target: Target, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "a")
    other = tmp_path / "b"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    torch.save(load_file(folder / "model.safetensors"), other / "pytorch_model.bin")
    found = []
    for path in (folder, other):
        bench = Bench(target, make(path, target))
        bench.absorb((0, 0, text(3, 9)))
        found.append(bench.propose((0, 9, 5))[0].tokens.tolist())
    assert found[0] == found[1]


@torch.inference_mode()
def test_batches_of_unequal_sequences(target: Target, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path)
    judge, bench = Judge(target, folder, USUAL), Bench(target, make(folder, target))
    texts = {3: text(1, 17), 0: text(2, 3), 2: text(3, 30)}
    bench.absorb(*((slot, 0, tokens[:-1]) for slot, tokens in texts.items()))
    work = [(slot, len(tokens) - 1, tokens[-1]) for slot, tokens in texts.items()]
    draft, logits = bench.propose(*work)
    for i, tokens in enumerate(texts.values()):
        drafts = draft.tokens[i].tolist()
        for found, want in zip(logits, judge.logits(tokens, drafts[:-1]), strict=True):
            near(found[i], want)


@pytest.mark.parametrize(("limit", "depth", "top_k"), [(10, 4, 3), (3, 6, 8), (25, 3, 5), (1, 1, 1)])
@torch.inference_mode()
def test_trees_are_eagle_2s(target: Target, tmp_path: Path, limit: int, depth: int, top_k: int) -> None:
    folder = write_eagle3(tmp_path)
    judge = Judge(target, folder, USUAL)
    drafter = make(folder, target, topology="tree", max_drafts=limit, depth=depth, top_k=top_k)
    assert (drafter.caps.topology, drafter.caps.deterministic) == ("tree", True)
    bench = Bench(target, drafter)
    texts = {1: text(11, 14), 2: text(12, 6)}
    bench.absorb(*((slot, 0, tokens[:-1]) for slot, tokens in texts.items()))
    draft, _ = bench.propose(*((slot, len(tokens) - 1, tokens[-1]) for slot, tokens in texts.items()))
    assert draft.parents is not None and draft.confidence is not None
    for i, tokens in enumerate(texts.values()):
        known: dict[tuple[int, ...], Tensor] = {}

        def behind(path: tuple[int, ...], tokens: list[int] = tokens, known: Any = known) -> Tensor:
            if path not in known:
                known[path] = judge.logits(tokens, list(path))[-1]
            return known[path]  # type: ignore[no-any-return]

        want = oracle.tree(behind, judge.ids, limit, depth, top_k)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens[i].tolist(), draft.parents[i].tolist(), strict=True):
            assert parent < len(paths), "a node comes before its parent"
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert paths == [path for path, _ in want]
        for path, own in zip(paths, draft.confidence[i].tolist(), strict=True):
            chances = torch.softmax(behind(path[:-1]), -1)
            assert own == pytest.approx(float(chances[judge.ids.index(path[-1])]), abs=1e-6)


# -- traps: each planted fault is noticed by the tests above


def leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Form.taps_of

    def taps(self: Form, layers: int) -> Any:
        return tuple((i, "out") for i, _ in right(self, layers))

    monkeypatch.setattr(Form, "taps_of", taps)


def indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle3_network, "vocabulary", lambda tensors, *_: tensors["d2t"])


def concatenation(monkeypatch: pytest.MonkeyPatch) -> None:
    right = eagle3_network.Network._inputs

    def inputs(self: Any, states: Tensor, tokens: Tensor) -> Any:
        x, residual = right(self, states, tokens)
        return torch.cat(x.chunk(2, -1)[::-1], -1), residual

    monkeypatch.setattr(eagle3_network.Network, "_inputs", inputs)


def shifted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_network, "shifted", lambda states, before, rows: states)


def first_position(monkeypatch: pytest.MonkeyPatch) -> None:
    from bien.core.executors.rows import Rows

    right = Rows.redirect
    monkeypatch.setattr(Rows, "redirect", lambda self, group, skip=0, **named: right(self, group, **named))


def feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    right = eagle3_network.Network.leave

    def leave(self: Any, residual: Tensor, mixed: Tensor) -> Any:
        states, logits = right(self, residual, mixed)
        return self._rms(states, self._norm), logits

    monkeypatch.setattr(eagle3_network.Network, "leave", leave)


def boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    from bien.core.executors.rows import Rows

    right = Rows.load_boundary
    monkeypatch.setattr(Rows, "load_boundary", lambda self, group: torch.zeros_like(right(self, group)))


TRAPS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (leaving, "whole"),
    (indices, "whole"),
    (concatenation, "whole"),
    (shifted_tokens, "whole"),
    (first_position, "whole"),
    (feedback, "whole"),
    (boundary, "chunks"),
]


@pytest.mark.parametrize(("plant", "way"), TRAPS, ids=[plant.__name__ for plant, _ in TRAPS])
@torch.inference_mode()
def test_a_trap_is_noticed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any, way: str
) -> None:
    folder = write_eagle3(tmp_path)
    check(target, folder, USUAL, (way,))
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="other logits|draft 0 is"):
        check(target, folder, USUAL, (way,))


@torch.inference_mode()
def test_marks_that_contradict_offsets_are_refused(target: Target, tmp_path: Path) -> None:
    config = eagle3_config("safeailab")
    tensors = eagle3_tensors("safeailab", config)
    ids = torch.arange(40) + tensors["d2t"]
    for offsets, problem in (
        (ids, "leads to tokens .* of 288|that t2d does not mark"),
        (torch.zeros(40, dtype=torch.int64), "that t2d does not mark"),
        (-torch.arange(40), "one token from two"),
        (torch.full((40,), 280), "leads to tokens 280 to 319 of 288"),
    ):
        folder = write(tmp_path, config, tensors | {"d2t": offsets})
        with pytest.raises(ModelError, match=problem):
            Bench(target, make(folder, target))


# -- folders


@pytest.mark.parametrize(
    ("maker", "changes", "problem"),
    [
        (
            "safeailab",
            {"architectures": ["DFlashDraftModel"]},
            "DFlashDraftModel.*expected an EAGLE-3 drafter",
        ),
        ("safeailab", {"draft_vocab_size": None}, "draft_vocab_size = None; expected"),
        ("speculators", {"speculators_model_type": "dflash"}, "'dflash'; expected an EAGLE-3"),
        ("speculators", {"norm_before_residual": None}, "does not say norm_before_residual"),
        ("speculators", {"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ("specforge", {"num_hidden_layers": 2}, "2 layers; valid: 1"),
        ("specforge", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; valid: 'silu'"),
        ("specforge", {"rms_norm_eps": None}, "rms_norm_eps = None"),
        ("specforge", {"fc_norm": "yes"}, "fc_norm = 'yes'; valid: true, false"),
        ("specforge", {"layer_types": ["sliding_attention"]}, "sliding window"),
        ("specforge", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("specforge", {"parallel_drafting": True}, "P-EAGLE"),
        ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = false"),
        ("speculators", {"aux_hidden_state_layer_ids": ["1"]}, r"\['1'\]; needs a list of layers"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, maker: str, changes: Any, problem: str) -> None:
    config = {**eagle3_config(maker), **changes}
    write(tmp_path, config, {})
    with pytest.raises(ModelError, match=problem):
        read_form(tmp_path)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json is missing; the folder of a drafter"):
        read_form(tmp_path / "none")


def test_tensors_that_are_wrong_are_named(target: Target, tmp_path: Path) -> None:
    config = eagle3_config("safeailab")
    tensors = eagle3_tensors("safeailab", config)
    del tensors["norm.weight"]
    tensors["fc.weight"] = torch.zeros(48, 96)
    tensors["extra"] = torch.zeros(1)
    folder = write(tmp_path, config, tensors)
    problem = (
        r"missing: norm.weight; unknown: extra; wrong shape: fc.weight is \[48, 96\], .* says \[48, 144\]"
    )
    with pytest.raises(ModelError, match=problem):
        Bench(target, make(folder, target))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights of .* cannot be read: .*; valid: model.safetensors"):
        Bench(target, make(folder, target))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target_hidden_size": 64}, "states of 64 features, but the target has 48"),
        ({"vocab_size": 300}, "a vocabulary of 300 tokens, but the target has 288"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 6]}}, "layer 6, .* layers 0 to 5"),
    ],
)
def test_another_targets_drafter_is_refused(
    target: Target, tmp_path: Path, changes: Any, problem: str
) -> None:
    with pytest.raises(DeploymentError, match=problem):
        make(write_eagle3(tmp_path, **changes), target)


def test_a_drawn_tree_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="sampled needs a chain"):
        make(write_eagle3(tmp_path), target, topology="tree", sampled=True)
