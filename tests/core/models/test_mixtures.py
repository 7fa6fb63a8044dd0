"""Configs of models with experts: the sizes of the real ones, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bien.core.architectures.base import Architecture
from bien.core.architectures.builtin import config
from bien.core.architectures.registry import read_architecture
from bien.core.architectures.weights import expected
from bien.core.errors import ModelError
from bien.core.models.gpt_oss import SingleExperts
from bien.core.testing.toy import write_toy
from tests.core.executors.driver import Driver
from tests.core.models.test_formats import codes, fp4, nibbles

GLM_4_7, GPT_OSS_120B = config("glm-4.7"), config("gpt-oss-120b")


def read(folder: Path, fields: dict[str, Any], **changes: Any) -> Architecture:
    merged = {k: v for k, v in {**fields, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    return read_architecture(folder, 16, "bfloat16")


def test_glm_4_7(tmp_path: Path) -> None:
    a = read(tmp_path, GLM_4_7)
    assert round(a.parameters / 1e9, 1) == 352.8
    assert round(a.active_parameters / 1e9, 1) == 33.6
    assert [g.bytes_per_token for g in a.groups] == [376_832]
    assert a.config["rotary_dim"] == 64
    further = {w.name.removeprefix("model.layers.92.") for w in a.weights if w.role == "mtp"}
    assert {"eh_proj.weight", "enorm.weight", "shared_head.norm.weight", "mlp.gate.weight"} < further
    assert {"self_attn.q_norm.weight", "mlp.experts.{}.up_proj.weight"} < further


@pytest.mark.parametrize("field", [
    "partial_rotary_factor", "use_qk_norm", "attention_bias", "first_k_dense_replace", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "moe_intermediate_size", "head_dim", "num_nextn_predict_layers",
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


def test_gpt_oss_120b(tmp_path: Path) -> None:
    a = read(tmp_path, GPT_OSS_120B)
    assert round(a.parameters / 1e9, 1) == 116.8
    assert round(a.active_parameters / 1e9, 1) == 5.7
    full, window = a.groups
    assert (full.bytes_per_token, full.layers) == (36_864, tuple(range(1, 36, 2)))
    assert (window.bytes_per_token, window.window, window.layers) == (36_864, 128, tuple(range(0, 36, 2)))
    assert a.config["swiglu_alpha"] == 1.702 and a.config["rope"]["truncate"] is False
    shapes = expected(a.weights)
    assert shapes["model.layers.35.mlp.experts.gate_up_proj"] == (128, 2880, 5760)
    assert shapes["model.layers.35.mlp.experts.down_proj_bias"] == (128, 2880)
    assert shapes["model.layers.0.self_attn.sinks"] == (64,)


@pytest.mark.parametrize("field", [
    "layer_types", "sliding_window", "attention_bias", "num_local_experts", "num_experts_per_tok",
    "swiglu_limit", "head_dim", "intermediate_size",
])  # fmt: skip
def test_gpt_oss_says_what_decides(field: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"lacks '{field}'"):
        read(tmp_path, GPT_OSS_120B, **{field: None})


def test_stacked_experts_are_taken_one_by_one() -> None:
    """Whatever slices a rank asks for, they are those of the single expert."""
    prefix, generator = "mlp.experts.", torch.Generator().manual_seed(1)
    shapes = {
        "gate_up_proj": (3, 6, 8),
        "gate_up_proj_bias": (3, 8),
        "down_proj": (3, 4, 6),
        "down_proj_bias": (3, 6),
    }
    tensors = {prefix + n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    source = SingleExperts(prefix, Tensors(tensors))  # type: ignore[arg-type]
    for e in range(3):
        both = tensors[prefix + "gate_up_proj"][e]
        for j, name in enumerate(("gate_proj", "up_proj")):
            assert source.shape(f"{prefix}{e}.{name}.weight") == (4, 6)
            assert source.shape(f"{prefix}{e}.{name}.bias") == (4,)
            found = source.take(f"{prefix}{e}.{name}.weight", (slice(1, 3), slice(0, 6)))
            assert torch.equal(found, both[:, j::2].t()[1:3])
            bias = source.take(f"{prefix}{e}.{name}.bias", (slice(2, 4),))
            assert torch.equal(bias, tensors[prefix + "gate_up_proj_bias"][e, j::2][2:4])
        assert source.shape(f"{prefix}{e}.down_proj.weight") == (6, 4)
        found = source.take(f"{prefix}{e}.down_proj.weight", (slice(0, 6), slice(2, 4)))
        assert torch.equal(found, tensors[prefix + "down_proj"][e].t()[:, 2:4])
        bias = source.take(f"{prefix}{e}.down_proj.bias", (slice(0, 0),))
        assert bias.shape == (0,)


def test_gpt_oss_in_mxfp4_is_the_unpacked_model(tmp_path: Path) -> None:
    """Experts in blocks of 32 inputs, as they are published."""
    logits = {}
    for packed in (False, True):
        folder = write_toy(tmp_path / str(packed), "gpt_oss", hidden_size=64, intermediate_size=32)
        tensors = load_file(folder / "model.safetensors")
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            code, power = codes(16, experts, outputs, inputs), codes(4, experts, outputs, inputs // 32) + 122
            if packed:
                blocks = nibbles(code).view(experts, outputs, -1, 16)
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": power}
            else:
                exact = fp4(code) * torch.pow(2.0, power.float() - 127).repeat_interleave(32, 2)
                tensors[name] = exact.transpose(1, 2).contiguous()
        save_file(tensors, folder / "model.safetensors")
        if packed:
            fields = json.loads((folder / "config.json").read_text())
            fields["quantization_config"] = {"quant_method": "mxfp4"}
            (folder / "config.json").write_text(json.dumps(fields))
        driver = Driver(folder)
        slot = driver.add(list(range(3, 33)))
        driver.step({slot: 30})
        logits[packed] = driver.logits[slot]
    assert abs(logits[True]).max() > 0.1
    assert (logits[True] == logits[False]).all()


class Tensors:
    """A checkpoint of given tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def take(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        return self._tensors[name][slices]
