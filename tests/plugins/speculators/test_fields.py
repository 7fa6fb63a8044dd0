"""Whatever stands in a drafter's files, what comes is a form or a ModelError by name."""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.api import ModelError
from bien.plugins.speculators._network import load_tensors
from bien.plugins.speculators.dflash import form as dflash
from bien.plugins.speculators.eagle3 import form as eagle3
from bien.plugins.speculators.mtp import form as mtp
from tests.plugins.speculators.block_folders import deep_spec, second, speculators, z_lab
from tests.plugins.speculators.folders import FORMATS, eagle3_config, write_mtp

Reader = Callable[[Path], Any]


def blocks(folder: Path) -> Any:
    return dflash.read_form(folder, "dflash")


def mtp_config(names: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = json.loads((write_mtp(Path(folder), names) / "config.json").read_text())
    return found


CONFIGS: list[tuple[Reader, dict[str, Any]]] = [
    *((eagle3.read_form, eagle3_config(maker)) for maker in FORMATS),
    *((mtp.read_form, mtp_config(names)) for names in ("speculators", "qwen")),
    *((blocks, config) for config in (z_lab(), second(), deep_spec(), speculators("dspark"))),
]
NAMES = [
    "architectures", "attention_bias", "aux_hidden_state_layer_ids", "block_size", "causal",
    "conv_group_size", "conv_kernel_size", "dflash_config", "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm", "head_dim", "hidden_act",
    "hidden_size", "input_embedding_scale", "layer_types", "markov_head_type", "markov_rank",
    "mask_token_id", "max_window_layers", "mlp_bias", "model_type", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "parallel_drafting", "partial_rotary_factor",
    "projector_type", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "selector_top_k",
    "sliding_window", "speculators_model_type", "target_hidden_size", "target_layer_ids",
    "transformer_layer_config", "use_sliding_window", "vocab_size",
]  # fmt: skip
NESTED = ("transformer_layer_config", "dflash_config", "eagle_config", "rope_parameters")
LEAVES = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES | st.sampled_from([10**400, 1 << 40, "full_attention", "yarn", "llama"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CONFIGS), st.sampled_from([None, *NESTED]), st.sampled_from(NAMES), VALUES)
def test_any_value_of_any_field(
    made: tuple[Reader, dict[str, Any]], inside: Any, name: str, value: Any
) -> None:
    read, config = made
    place = config if inside is None else config.get(inside, {})
    config = {**config, name: value} if inside is None else {**config, inside: {**place, name: value}}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            read(Path(folder))
        except ModelError as error:
            assert folder in str(error)


@pytest.mark.parametrize("at", range(len(CONFIGS)))
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = nan; needs a finite number above 0"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps = inf; needs a finite number above 0"),
        (
            {"partial_rotary_factor": "a"},
            "partial_rotary_factor = 'a'; needs a finite number above 0, at most 1",
        ),
        ({"partial_rotary_factor": 9.0}, r"partial_rotary_factor = 9\.0; needs .* at most 1"),
        ({"partial_rotary_factor": 0.01}, "partial_.* an even number of a head's 1[02] features, not 0"),
        ({"layer_types": 5}, "layer_types = 5; needs a list of names"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes'; valid: true, false"),
        ({"num_attention_heads": 4.0}, r"num_attention_heads = 4\.0; needs a whole number above 0"),
    ],
)
def test_fields_of_layers(at: int, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    read, config = CONFIGS[at]
    layer = config.get("transformer_layer_config")
    config = (
        {**config, **changes} if layer is None else {**config, "transformer_layer_config": layer | changes}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"config\.json has {says}"):
        read(tmp_path)


@pytest.mark.parametrize("value", [{"a": 1}, 5, "DFlashDraftModel", [3]])
def test_architectures_are_a_list_of_names(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**z_lab(), "architectures": value}))
    with pytest.raises(ModelError, match=r"architectures = .*; needs a list of names"):
        blocks(tmp_path)


@pytest.mark.parametrize("value", [[1], "x", 3])
def test_eagle_config_is_an_object(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**eagle3_config("specforge"), "eagle_config": value}))
    with pytest.raises(ModelError, match=r"eagle_config = .*; needs an object"):
        eagle3.read_form(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[1]", "None in weight_map"),
        ("{}", "None in weight_map"),
        ('{"weight_map": [1]}', r"\[1\] in weight_map"),
        ('{"weight_map": {"a": 3}}', "3 in weight_map; needs an object that gives each tensor's name"),
        ('{"weight_map": {"a": "../b"}}', r"'\.\./b' in weight_map"),
        ("{", "cannot be read"),
    ],
)
def test_an_index_that_is_none(index: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=f"^mtp: .*{says}"):
        load_tensors(tmp_path, {}, {}, None, "mtp")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[1], {"a": 1}, b"other"])
def test_a_pickle_of_other_things(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(value) if isinstance(value, bytes) else torch.save(value, path)
    with pytest.raises(ModelError, match=r"^eagle3: .*pytorch_model\.bin"):
        load_tensors(tmp_path, {}, {}, None, "eagle3")  # type: ignore[arg-type]
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(ModelError, match=r"^eagle3: "):
        load_tensors(tmp_path, {}, {}, None, "eagle3")  # type: ignore[arg-type]
