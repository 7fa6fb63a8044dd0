"""Folders of block drafters: what each format says, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from bien.core.api import Context, DeploymentError, ModelError
from bien.core.architectures.registry import read_architecture
from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.core.worker.memory import plan_memory
from bien.plugins.speculators import dflash
from bien.plugins.speculators.dflash import DFlashConfig, DSparkConfig, make
from bien.plugins.speculators.dflash.form import BlockForm, read_form
from tests.plugins.speculators.block_bench import BlockBench, loaded
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
from tests.plugins.speculators.test_dflash import build, check, whole


def form(folder: Path, config: dict[str, Any]) -> BlockForm:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_form(folder, "dflash")


def test_what_the_formats_say(tmp_path: Path) -> None:
    found = form(tmp_path, z_lab())
    assert (found.kind, found.block, found.drafts, found.from_anchor) == ("dflash", 6, 5, False)
    assert (found.taps, found.mask, found.target_layers, found.draft_vocab) == ((0, 2, 3), 270, 5, 0)
    found = form(tmp_path, second())
    assert (found.kind, found.block, found.drafts, found.conv_taps, found.selector_top_k) == (
        "dflash",
        5,
        4,
        2,
        5,
    )
    for config in (spec_forge(), deep_spec()):
        found = form(tmp_path, config)
        assert (found.kind, found.drafts, found.from_anchor) == ("dspark", 6, True)
        assert (found.markov_rank, found.markov, found.confidence_markov) == (8, "vanilla", True)
    found = form(tmp_path, deep_spec(markov_rank=0, enable_confidence_head=False))
    assert (found.kind, found.drafts) == ("dflash", 6)
    found = form(tmp_path, speculators("dflash"))
    assert (found.taps, found.drafts, found.draft_vocab) == ((0, 2, 3), 5, 96)
    assert form(tmp_path, speculators("dspark")).drafts == 6


def test_a_field_is_looked_for_in_order(tmp_path: Path) -> None:
    config = z_lab(block_size=4)
    assert form(tmp_path, {**config, "eagle_config": {"block_size": 9}, "block_size": 11}).block == 4
    del config["dflash_config"]["block_size"]
    assert form(tmp_path, {**config, "eagle_config": {"block_size": 9}, "block_size": 11}).block == 9
    assert form(tmp_path, {**config, "block_size": 11}).block == 11


def test_target_layers_by_default(tmp_path: Path) -> None:
    """z-lab's: evenly from layer 1 to the third from the end."""
    config = z_lab()
    del config["dflash_config"]["target_layer_ids"]
    assert form(tmp_path, {**config, "num_target_layers": 36}).taps == (1, 17, 33)
    one = {**config, "num_target_layers": 36, "num_hidden_layers": 1, "layer_types": [FULL]}
    assert form(tmp_path, one).taps == (18,)


def test_who_sees_whom_in_a_block(tmp_path: Path) -> None:
    mixed = {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 7}
    assert form(tmp_path, {**z_lab(), **mixed}).causal == (False, True, True)
    assert form(tmp_path, {**z_lab(), **mixed}).windows == (0, 7, 7)
    assert form(tmp_path, {**z_lab(), **mixed, "is_causal": False}).causal == (False,) * 3
    assert form(tmp_path, {**z_lab(causal=True), "is_causal": False}).causal == (True,) * 3
    library = speculators("dflash", sliding_window_non_causal=True)
    library["transformer_layer_config"] |= mixed
    assert form(tmp_path, library).causal == (False,) * 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**z_lab(), "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.* no block drafter"),
        ({**z_lab(), "architectures": ["DFlashDraftModl"]}, "'DFlashDraftModel'"),
        (speculators("eagle3"), "speculators_model_type = 'eagle3' is no block drafter"),
        (z_lab(projector_type="domino"), "projector_type = 'domino'"),
        (z_lab(attention_sink_bias=True), "attention_sink_bias"),
        (z_lab(shift_label=True), "shift_label"),
        (z_lab(use_aux_hidden_state=False), "use_aux_hidden_state = False"),
        (z_lab(gru_hidden_dim=1024), "not known: gru_hidden_dim"),
        (spec_forge(markov_head_type="lstm"), "'lstm'.*vanilla"),
        (spec_forge(attention_mode="mla"), "attention_mode = 'mla'"),
        (spec_forge(markov_rank=0), "confidence_head_with_markov needs markov_rank"),
        (z_lab(mask_token_id=288), "mask_token_id = 288; needs a token id below 288"),
        (z_lab(target_layer_ids=[0, 4]), "target layer 4; of 5 layers valid: -1 .* to 3"),
        (z_lab(target_layer_ids=[-2, 1]), "target layers"),
        (z_lab(target_layer_ids=[1, 1]), "different ones"),
        (z_lab(target_layer_ids="1,2"), "target_layer_ids = '1,2'"),
        (speculators("dflash", aux_hidden_state_layer_ids=[1, 5], num_target_layers=5), "target layer 4"),
        ({**z_lab(), "block_size": 1}, "block_size = 1 leaves no token"),
        ({**z_lab(), "block_size": None}, "block_size = None"),
        ({**z_lab(), "layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({**z_lab(), "layer_types": [SLIDING] * 3}, "sliding_window = None"),
        ({**z_lab(), "num_key_value_heads": 3}, "multiple of KV heads"),
        ({**z_lab(), "dflash_config": [1]}, "dflash_config = .1.; needs an object"),
        (second(conv_group_size=7), "conv_group_size = 7 does not divide"),
    ],
)
def test_wrong_configs_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"dflash: .*{words}"):
        form(tmp_path, config)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"dflash: .*absent.config\.json is missing"):
        read_form(tmp_path / "absent", "dflash")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_form(tmp_path, "dflash")


def test_heads_are_not_left_out(tmp_path: Path) -> None:
    """A Markov head, a selector or convolutions that a drafter ignored would only make drafts worse."""
    spark = write_drafter(tmp_path / "spark", deep_spec())
    with pytest.raises(ModelError, match="has heads that would be left out; use 'dspark'"):
        build("dflash", spark)
    flash = write_drafter(tmp_path / "flash", z_lab())
    with pytest.raises(ModelError, match="no Markov and no confidence head; use 'dflash'"):
        build("dspark", flash)
    named = {**second(), "architectures": ["DFlashDraftModel"]}  # by the name alone it is DFlash
    assert form(tmp_path / "named", named).selector_rank == 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_toy(folder, num_hidden_layers=TARGET_LAYERS, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return loaded(target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, that of .* is 48"),
        ({"vocab_size": 300}, "vocab_size is 300, that of .* is 288"),
        ({"num_target_layers": 6}, "num_target_layers is 6, that of .* is 5"),
        ({"num_target_layers": None, "target_layer_ids": [1, 4]}, "output of target layer 4"),
    ],
)
def test_drafters_of_another_model(changes: dict[str, Any], words: str, tmp_path: Path, target: Path) -> None:
    folder = write_drafter(tmp_path, deep_spec(**changes))
    with pytest.raises((DeploymentError, ModelError), match=f"dspark: .*{words}"):
        DSparkConfig(str(folder)).groups(read_architecture(target, 16, "float32"), 16)


def test_weights_that_do_not_fit(tmp_path: Path, model: Any) -> None:
    more = {
        "layers.9.mlp.up_proj.weight": np.zeros((2, 2), np.float32),
        "norm.weight": np.zeros(3, np.float32),
    }
    folder = write_drafter(tmp_path, z_lab(), **more)
    with pytest.raises(ModelError, match=r"dflash: .*unknown: layers\.9\.mlp.*norm\.weight is \[3\]"):
        BlockBench(build("dflash", folder), *model)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_draft_vocabularies_that_lead_nowhere(kind: str, tmp_path: Path, model: Any) -> None:
    right = 2 * np.arange(96) + 1
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"d2t": right + 100_000}, "leads to tokens 100001 to 100286 of 288"),
        ({"d2t": right - 500}, "leads to tokens -499 to -214 of 288"),
        ({"d2t": -np.arange(96)}, "leads to one token from two indices"),
        ({"d2t": right + 1}, "that t2d does not mark"),
        ({"t2d": np.arange(288) < 97}, "that t2d does not mark"),
        ({"d2t": right.astype(np.float32)}, "is of a floating-point type, not of whole numbers"),
    )
    for more, words in cases:
        folder = write_drafter(tmp_path, speculators(kind), **more)
        with pytest.raises(ModelError, match=f"{kind}: d2t of .*{words}; it must hold offsets"):
            BlockBench(build(kind, folder), *model)


def test_a_whole_vocabulary_keeps_its_order(tmp_path: Path, model: Any) -> None:
    same = write_drafter(tmp_path, z_lab(), d2t=np.zeros(288, np.int64))
    BlockBench(build("dflash", same), *model)
    other = write_drafter(tmp_path, z_lab(), d2t=287 - 2 * np.arange(288))
    with pytest.raises(ModelError, match="reorders the target's whole vocabulary"):
        BlockBench(build("dflash", other), *model)


@pytest.mark.parametrize("same", [True, False])
def test_copies_of_the_target(same: bool, tmp_path: Path, target: Path, model: Any) -> None:
    """DeepSpec saves embedding and head: the target's serve, unless these are others."""
    theirs = load_file(target / "model.safetensors")
    names = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    noise = np.random.default_rng(5)
    copies = {
        own: theirs[name] if same else noise.normal(size=theirs[name].shape).astype(np.float32)
        for own, name in names.items()
    }
    folder = write_drafter(tmp_path, deep_spec(), **copies)
    bench = BlockBench(build("dspark", folder), *model)
    check(bench, Oracle(folder, target), ways=(whole,))
    assert (bench.drafter._embedding is None) is same  # type: ignore[attr-defined]
    assert (bench.drafter._output is None) is same  # type: ignore[attr-defined]


def test_room_for_the_context(tmp_path: Path, target: Path) -> None:
    a = read_architecture(target, 16, "bfloat16")
    folder = write_drafter(tmp_path, {**z_lab(), "layer_types": [FULL, SLIDING, FULL], "sliding_window": 7})
    full, window = DFlashConfig(str(folder)).groups(a, 16)
    assert (full.layers, full.window, window.layers, window.window) == ((0, 2), 0, (1,), 7)
    assert full.bytes_per_token == 2 * window.bytes_per_token == 2 * 2 * 2 * 2 * 12
    both = DFlashConfig(str(folder), window=5).groups(a, 16)
    assert [(g.layers, g.window) for g in both] == [((0, 1, 2), 5)]


def test_parameters(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, deep_spec())
    caps = build("dspark", folder, max_drafts=4).caps
    assert (caps.max_drafts, caps.q_kind, caps.confidence) == (4, "dense", "prior")
    assert (caps.lookahead, caps.taps) == (0, ((0, "out"), (2, "out"), (3, "out")))
    assert build("dspark", folder, sampled=False).caps.q_kind == "onehot"
    assert build("dflash", write_drafter(tmp_path / "2", second())).caps.q_kind == "sparse"
    with pytest.raises(DeploymentError, match=r"max_drafts = 7, .* has 6; valid: 1 to 6"):
        build("dspark", folder, max_drafts=7)
    with pytest.raises(ModelError, match="parameters have 2 temperatures; a block has 6 drafts"):
        build("dspark", folder, temperatures=[1.0, 2.0])
    with pytest.raises(msgspec.ValidationError, match="temperatures"):
        build("dspark", folder, temperatures=[0.0] * 6)


def test_calibration(tmp_path: Path, model: Any) -> None:
    """Of the folder's file, unless parameters say otherwise; each position has its own."""
    folder = write_drafter(tmp_path, deep_spec())

    def chances(**parameters: Any) -> Any:
        bench = BlockBench(build("dspark", folder, **parameters), *model)
        whole(bench, list(range(3, 23)))
        return bench.propose([(1, 19, 9)], [[0]] * 6)[0].confidence.numpy()  # type: ignore[union-attr]

    plain, heat = chances(), [0.5, 1.0, 2.0, 3.0, 1.0, 0.7]
    (folder / "calibration.json").write_text(json.dumps({"temperatures": heat, "made": "by hand"}))
    logit = np.log(plain / (1 - plain)) / np.array(heat)
    assert np.allclose(chances(), 1 / (1 + np.exp(-logit)), atol=1e-5)
    assert np.allclose(chances(temperatures=[1.0] * 6), plain, atol=1e-5)
    (folder / "calibration.json").write_text('{"temperatures": [1.0]}')
    with pytest.raises(ModelError, match=r"calibration\.json has 1 temperatures; a block has 6"):
        build("dspark", folder)
    (folder / "calibration.json").write_text('{"temperatures": [-1]}')
    with pytest.raises(ModelError, match="is no calibration"):
        build("dspark", folder)


def test_providers() -> None:
    made = {p.name: p for p in dflash.bien_providers()}
    assert set(made) == {"dflash", "dspark"}
    with pytest.raises(ModelError, match="nowhere"):
        make(made["dspark"].config_type(path="/nowhere"), Context())


def test_memory_is_counted_before_anything_is_made(tmp_path: Path, target: Path) -> None:
    folder = write_drafter(tmp_path, deep_spec())
    needs = []
    for max_drafts in (None, 6, 1):
        parameters = {"path": str(folder)} | ({} if max_drafts is None else {"max_drafts": max_drafts})
        pool = PoolSpec(speculator=Selection("dspark", parameters))
        composition = compose(
            Deployment(ModelSpec(str(target)), GatewaySpec(), (pool,)), PluginManager.load()
        )
        needs.append(plan_memory(composition, composition.model, 1 << 40).workers[0].workspace)
    assert needs[0] == needs[1] > needs[2]
