"""Configs of models with experts: the sizes of the real ones, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bien.core.architectures.base import Architecture
from bien.core.architectures.registry import read_architecture
from bien.core.errors import ModelError

GLM_4_7: dict[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "vocab_size": 151552,
    "max_position_embeddings": 202752,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> Architecture:
    merged = {k: v for k, v in {**config, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    return read_architecture(folder, 16, "bfloat16")


def test_glm_4_7(tmp_path: Path) -> None:
    a = read(tmp_path, GLM_4_7)
    assert round(a.parameters / 1e9, 1) == 352.8
    assert round(a.active_parameters / 1e9, 1) == 33.6
    assert [g.bytes_per_token for g in a.groups] == [376_832]
    assert a.config["rotary_dim"] == 64


@pytest.mark.parametrize("field", [
    "partial_rotary_factor", "use_qk_norm", "attention_bias", "first_k_dense_replace", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "moe_intermediate_size", "head_dim",
])  # fmt: skip
def test_glm_says_what_decides(field: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"lacks '{field}'"):
        read(tmp_path, GLM_4_7, **{field: None})


@pytest.mark.parametrize(("changes", "match"), [
    ({"n_group": 7}, "n_group = 7 does not part n_routed_experts = 160"),
    ({"n_group": 160}, "groups of two or more"),
    ({"topk_group": 2}, "topk_group = 2; needs at most 1"),
    ({"num_experts_per_tok": 161}, "num_experts_per_tok = 161; needs at most 160"),
    ({"n_shared_experts": -1}, "n_shared_experts = -1"),
    ({"partial_rotary_factor": 1.5}, "rotates 192 features; needs an even number up to 128"),
    ({"partial_rotary_factor": 0.0}, "rotates 0 features"),
])  # fmt: skip
def test_glm_refuses(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=match):
        read(tmp_path, GLM_4_7, **changes)
