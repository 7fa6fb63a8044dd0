"""What Kimi-Linear and Kimi K3 are said to be: strict readers, counts, names and shapes of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.architectures.weights import expected
from bien.core.errors import ModelError, UserError
from bien.core.kv.groups import GroupKind
from bien.plugins.parallel.tensor import TensorParallel
from tests.core.models.kimi_oracle import k3_config, linear_config, shapes, write_tiny


def test_kimi_k3_counts() -> None:
    a = read_architecture("kimi-k3", 64, "bfloat16")
    embedding = a.vocab_size * a.hidden_size
    assert a.name == "kimi_k3" and a.layers == 93
    assert a.parameters == 2_779_484_478_208
    assert a.active_parameters == 105_364_019_968
    assert a.active_parameters - embedding == 104_189_614_848
    latent, state, conv = a.groups
    assert (latent.kind, latent.bytes_per_token, len(latent.layers)) == (GroupKind.LATENT, 27_648, 24)
    assert latent.layers[:2] == (3, 7) and latent.layers[-3:] == (87, 91, 92)
    assert (state.kind, state.constant_bytes, len(state.layers)) == (GroupKind.STATE, 434_110_464, 69)
    assert (conv.kind, conv.constant_bytes, conv.layers) == (GroupKind.STATE, 15_261_696, state.layers)
    assert (state.dtype, conv.dtype) == ("float32", "bfloat16")
    assert not any(g.shardable for g in a.groups)
    full, delta = a.attention
    assert (full.layers, full.per_position) == (24, 2 * 96 * (2 * 512 + 64))
    assert (delta.layers, delta.constant, delta.per_position) == (69, 7 * 96 * 128 * 128, 0)
    assert a.flops(100_001) - a.flops(1) == 100_000 * 5_013_504
    by_role = {role: sum(w.size * w.copies for w in a.weights if w.role == role) for role in ("routed",)}
    assert by_role["routed"] == 92 * 896 * 3 * 3584 * 3072
    assert a.eos_token_ids == (163586,)


def test_kimi_linear_counts() -> None:
    a = read_architecture("kimi-linear-48b", 64, "bfloat16")
    assert a.parameters == 49_122_681_728
    assert a.active_parameters == 3_484_459_904
    latent, state, conv = a.groups
    assert (latent.bytes_per_token, latent.layers) == (8_064, (3, 7, 11, 15, 19, 23, 26))
    assert (state.constant_bytes, conv.constant_bytes) == (41_943_040, 1_474_560)
    assert a.max_context == 1_048_576


@pytest.mark.parametrize("config", [linear_config(), k3_config()])
def test_names_and_shapes_of_tensors(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert expected(read_architecture(tmp_path, 8, "float32").weights) == shapes(config)


def test_one_dense_model_without_a_layer_of_either_kind(tmp_path: Path) -> None:
    own = {**linear_config()["linear_attn_config"], "full_attn_layers": [], "kda_layers": [1]}
    config = linear_config(num_hidden_layers=1, linear_attn_config=own)
    folder = write_tiny(tmp_path / "m", config)
    assert [g.name for g in read_architecture(folder, 8, "float32").groups] == ["state", "conv"]


NEEDED = {
    "linear": ("hidden_act", "linear_attn_config", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
               "qk_rope_head_dim", "v_head_dim", "mla_use_nope", "num_experts", "num_experts_per_token",
               "num_shared_experts", "num_expert_group", "topk_group", "moe_renormalize",
               "moe_router_activation_func", "routed_scaling_factor", "moe_intermediate_size",
               "first_k_dense_replace", "rms_norm_eps", "tie_word_embeddings", "model_max_length",
               "hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers"),
    "k3": ("attn_res_block_size", "activation_situ_beta", "activation_situ_linear_beta",
           "latent_moe_use_norm", "mla_use_output_gate", "routed_expert_hidden_size",
           "max_position_embeddings"),
}  # fmt: skip
LINEAR_NEEDED = {
    "linear": ("full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"),
    "k3": ("gate_lower_bound", "use_full_rank_gate", "full_attn_layers"),
}


def read(config: dict[str, Any], tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_architecture(tmp_path, 8, "float32")


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in NEEDED.items() for n in names])
def test_a_field_that_is_missing(kind: str, name: str, tmp_path: Path) -> None:
    config = linear_config() if kind == "linear" else k3_config()
    del config.get("text_config", config)[name]
    own = {"model_max_length": "model_max_length", "max_position_embeddings": "model_max_length"}
    with pytest.raises(ModelError, match=f"lacks '{own.get(name, name)}'"):
        read(config, tmp_path)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in LINEAR_NEEDED.items() for n in names])
def test_a_field_of_linear_attn_config_that_is_missing(kind: str, name: str, tmp_path: Path) -> None:
    config = linear_config() if kind == "linear" else k3_config()
    del config.get("text_config", config)["linear_attn_config"][name]
    with pytest.raises(ModelError, match=f"linear_attn_config.* lacks '{name}'"):
        read(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; valid: 'silu', 'situ'"),
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported"),
        ({"moe_router_activation_func": "softmax"}, "'softmax' is not supported; valid: 'sigmoid'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 is not supported"),
        ({"attn_res_block_size": 2}, "attn_res_block_size = 2 is not supported"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate = True is not supported"),
        ({"full_attn_layers": [2, 4]}, "must name each layer from 1 to 5 once"),
        ({"full_attn_layers": [0, 3, 5]}, "must name each layer from 1 to 5 once"),
        ({"full_attn_layers": [3]}, "must name each layer from 1 to 5 once"),
        ({"full_attn_layers": "3,5"}, "lacks 'full_attn_layers', a list of layers counted from one"),
        ({"gate_lower_bound": -5.0}, "gate_lower_bound = -5.0 is not supported"),
        ({"short_conv_kernel_size": 1}, "short_conv_kernel_size = 1"),
    ],
)
def test_what_kimi_linear_is_not(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = linear_config()
    own = ("full_attn_layers", "gate_lower_bound", "short_conv_kernel_size")
    for name, value in changes.items():
        (config["linear_attn_config"] if name in own else config)[name] = value
    with pytest.raises(ModelError, match=message):
        read(config, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "kimi_k3"}, "lacks 'text_config'"),
        ({"model_type": "kimi_k3", "text_config": {}}, "lacks 'model_type'"),
        (
            {"model_type": "kimi_k3", "text_config": {"model_type": "llama"}},
            "model_type = 'llama' is not supported; valid: 'kimi_linear'",
        ),
        (k3_config(hidden_act="silu"), "hidden_act = 'silu' is not supported; valid: 'situ'"),
    ],
)
def test_what_kimi_k3_is_not(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(config, tmp_path)


def test_a_bound_that_lets_states_grow(tmp_path: Path) -> None:
    config = k3_config()
    config["text_config"]["linear_attn_config"]["gate_lower_bound"] = 0.5
    with pytest.raises(ModelError, match="gate_lower_bound = 0.5; needs a negative number"):
        read(config, tmp_path)


@pytest.mark.parametrize("config", [linear_config(), k3_config()])
def test_strategy_tensor_does_not_cut_it(config: dict[str, Any], tmp_path: Path) -> None:
    strategy = TensorParallel(read(config, tmp_path))
    with pytest.raises(UserError, match="cannot cut models of architecture 'kimi_"):
        strategy.mesh(2)
