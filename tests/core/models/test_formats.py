"""Checkpoints in publishers' quantized formats: each is written by hand and read as the formula says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bien.core.errors import ModelError
from bien.core.models.formats import check_readable
from bien.core.models.loading import Checkpoint

CPU = torch.device("cpu")
ROWS, COLUMNS = 24, 64
NAME = "layer.weight"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Made = tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]  # tensors, quantization_config, exact


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def codes(top: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=generator(), dtype=torch.uint8)


def fp4(code: torch.Tensor) -> torch.Tensor:
    sign = torch.where(code >= 8, -1.0, 1.0)
    return sign * torch.tensor(E2M1)[(code % 8).long()]


def nibbles(code: torch.Tensor) -> torch.Tensor:
    return code[..., ::2] | (code[..., 1::2] << 4)


def fp8_blocks() -> Made:
    weight = torch.randn(ROWS, COLUMNS, generator=generator()).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 4, generator=generator()) + 0.5  # blocks of 10 x 20: the last ones are cut
    exact = weight.float() * scale.repeat_interleave(10, 0)[:ROWS].repeat_interleave(20, 1)[:, :COLUMNS]
    config = {"quant_method": "fp8", "weight_block_size": [10, 20]}
    return {NAME: weight, f"{NAME}_scale_inv": scale}, config, exact


def fp8_channel() -> Made:
    weight = torch.randn(ROWS, COLUMNS, generator=generator()).to(torch.float8_e4m3fn)
    scale = torch.rand(ROWS, 1, generator=generator()).to(torch.bfloat16)
    tensors = {NAME: weight, f"{NAME}_scale": scale, "layer.input_scale": torch.ones(1)}
    return tensors, {"quant_method": "compressed-tensors"}, weight.float() * scale.float()


def fp8_tensor() -> Made:
    weight = torch.randn(ROWS, COLUMNS, generator=generator()).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.37)
    return {NAME: weight, f"{NAME}_scale": scale}, {"quant_method": "modelopt"}, weight.float() * scale


def int8_channel() -> Made:
    weight = torch.randint(-127, 128, (ROWS, COLUMNS), generator=generator(), dtype=torch.int8)
    scale = torch.rand(ROWS, 1, generator=generator())
    return (
        {NAME: weight, f"{NAME}_scale": scale},
        {"quant_method": "compressed-tensors"},
        weight.float() * scale,
    )


def pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    per = 32 // bits
    words = levels.numpy().astype(np.uint32).reshape(len(levels), -1, per)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    packed: np.ndarray[Any, Any] = np.bitwise_or.reduce(words << shifts, axis=-1)
    return torch.from_numpy(packed.view(np.int32).copy())


def packed(bits: int, *, zero: bool = False) -> Made:
    levels = codes(1 << bits, ROWS, COLUMNS)
    scale = torch.rand(ROWS, COLUMNS // 16, generator=generator()).to(torch.bfloat16)
    tensors = {
        f"{NAME}_packed": pack(levels, bits),
        f"{NAME}_scale": scale,
        f"{NAME}_shape": torch.tensor([ROWS, COLUMNS]),
    }
    middle = torch.full((ROWS, COLUMNS // 16), 1 << (bits - 1), dtype=torch.uint8)
    if zero:
        middle = codes(1 << bits, ROWS, COLUMNS // 16)
        tensors[f"{NAME}_zero_point"] = pack(middle.t().contiguous(), bits).t().contiguous()
    exact = (levels.float() - middle.repeat_interleave(16, 1)) * scale.float().repeat_interleave(16, 1)
    return tensors, {"quant_method": "compressed-tensors"}, exact


def mxfp4() -> Made:
    code, power = codes(16, ROWS, COLUMNS), codes(10, ROWS, COLUMNS // 32) + 122
    exact = fp4(code) * torch.pow(2.0, power.float() - 127).repeat_interleave(32, 1)
    tensors = {f"{NAME}_packed": nibbles(code), f"{NAME}_scale": power}
    return tensors, {"quant_method": "compressed-tensors"}, exact


def nvfp4_divisor() -> Made:
    code = codes(16, ROWS, COLUMNS)
    scale = (torch.rand(ROWS, COLUMNS // 16, generator=generator()) * 100).to(torch.float8_e4m3fn)
    divisor = torch.tensor([730.0])
    exact = fp4(code) * scale.float().repeat_interleave(16, 1) / divisor
    tensors = {
        f"{NAME}_packed": nibbles(code),
        f"{NAME}_scale": scale,
        f"{NAME}_global_scale": divisor,
        "layer.input_global_scale": torch.ones(1),
    }
    return tensors, {"quant_method": "compressed-tensors"}, exact


def nvfp4_multiplier() -> Made:
    tensors, _, exact = nvfp4_divisor()
    found = {
        NAME: tensors[f"{NAME}_packed"],
        f"{NAME}_scale": tensors[f"{NAME}_scale"],
        f"{NAME}_scale_2": torch.tensor(1 / 730.0),
    }
    return found, {"quant_method": "modelopt"}, exact


FORMATS: dict[str, Callable[[], Made]] = {
    "fp8-blocks": fp8_blocks,
    "fp8-channel": fp8_channel,
    "fp8-tensor": fp8_tensor,
    "int8-channel": int8_channel,
    "int4-groups": lambda: packed(4),
    "int4-zero-points": lambda: packed(4, zero=True),
    "int8-groups": lambda: packed(8),
    "mxfp4": mxfp4,
    "nvfp4-divisor": nvfp4_divisor,
    "nvfp4-multiplier": nvfp4_multiplier,
}


def opened(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder, torch.float32, CPU, {"quantization_config": config})


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized(name: str, tmp_path: Path) -> None:
    tensors, config, exact = FORMATS[name]()
    with opened(tmp_path, {**tensors, "norm.weight": torch.ones(4)}, config) as checkpoint:
        checkpoint.check({NAME: (ROWS, COLUMNS), "norm.weight": (4,)})
        assert torch.allclose(checkpoint.take(NAME), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_reads_its_part(name: str, tmp_path: Path) -> None:
    tensors, config, exact = FORMATS[name]()
    with opened(tmp_path, tensors, config) as checkpoint:
        for rows in (slice(0, ROWS), slice(0, 9), slice(7, 21), slice(23, 24)):
            for columns in (slice(0, COLUMNS), slice(0, 32), slice(13, 50), slice(63, 64)):
                part = checkpoint.take(NAME, (rows, columns))
                assert torch.allclose(part, exact[rows, columns], rtol=1e-6, atol=0), (rows, columns)


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    code, power = codes(16, 3, 20, 64), codes(10, 3, 20, 2) + 122
    exact = (fp4(code) * torch.pow(2.0, power.float() - 127).repeat_interleave(32, 2)).transpose(1, 2)
    name = "mlp.experts.gate_up_proj"
    blocks = nibbles(code).view(3, 20, 2, 16)
    with opened(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": power}, {}) as checkpoint:
        checkpoint.check({name: (3, 64, 20)})
        assert torch.equal(checkpoint.take(name), exact)
        for part in (
            (slice(1, 2), slice(0, 64), slice(4, 9)),
            (slice(0, 3), slice(40, 50), slice(0, 20)),
            (slice(2, 3), slice(31, 33), slice(19, 20)),
            (slice(1, 2),),
        ):
            assert torch.equal(checkpoint.take(name, part), exact[part])


def test_of_stacked_experts_only_the_wanted_ones_are_read(tmp_path: Path) -> None:
    """A model takes them expert by expert: each time all of them would be quadratic in their number."""
    name, read = "mlp.experts.down_proj", []

    class Counted:
        def __init__(self, part: Any) -> None:
            self.part = part

        def __getitem__(self, slices: Any) -> torch.Tensor:
            found: torch.Tensor = self.part[slices]
            read.append(tuple(found.shape[:3]))
            return found

    tensors = {f"{name}_blocks": codes(256, 8, 20, 4, 16), f"{name}_scales": codes(10, 8, 20, 4) + 122}
    with opened(tmp_path, tensors, {}) as checkpoint:
        stored = checkpoint._tensors[name]
        stored.parts = {what: Counted(part) for what, part in stored.parts.items()}
        checkpoint.take(name, (slice(5, 6), slice(32, 96), slice(10, 20)))
    assert read == [(1, 10, 2), (1, 10, 2)]


def test_scales_of_experts_that_do_not_fit(tmp_path: Path) -> None:
    name = "mlp.experts.down_proj"
    tensors = {f"{name}_blocks": codes(256, 3, 20, 2, 16), f"{name}_scales": codes(10, 3, 20, 1) + 122}
    with pytest.raises(ModelError, match=r"down_proj_scales \[3, 20, 1\] do not fit"):
        opened(tmp_path, tensors, {})
    with pytest.raises(ModelError, match="down_proj_blocks of"):
        opened(tmp_path, {**tensors, f"{name}_blocks": codes(256, 3, 20, 32)}, {})


@pytest.mark.parametrize(
    "companion", ["layer.weight_scale_inv", "layer.weight_zero_point", "other.weight_scale"]
)
def test_a_scale_of_nothing_quantized_is_unknown(companion: str, tmp_path: Path) -> None:
    tensors = {NAME: torch.ones(ROWS, COLUMNS), companion: torch.ones(1)}
    with (
        opened(tmp_path, tensors, {}) as checkpoint,
        pytest.raises(ModelError, match=f"unknown: {companion}"),
    ):
        checkpoint.check({NAME: (ROWS, COLUMNS)})


@pytest.mark.parametrize("lost", ["weight_scale", "weight_shape"])
def test_a_companion_is_missing(lost: str, tmp_path: Path) -> None:
    tensors, config, _ = packed(4)
    del tensors[f"layer.{lost}"]
    with pytest.raises(ModelError, match=f"layer.{lost}"):
        opened(tmp_path, tensors, config)


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    tensors, config, _ = fp8_blocks()
    with pytest.raises(ModelError, match="weight_scale_inv"):
        opened(tmp_path, tensors, {**config, "weight_block_size": [128, 128]})
    tensors, config, _ = packed(4)
    tensors[f"{NAME}_shape"] = torch.tensor([ROWS, 3 * COLUMNS])
    with pytest.raises(ModelError, match="weight_packed"):
        opened(tmp_path, tensors, config)


def test_activation_order_is_refused(tmp_path: Path) -> None:
    tensors, config, _ = packed(4)
    tensors[f"{NAME}_g_idx"] = torch.zeros(COLUMNS, dtype=torch.int32)
    with pytest.raises(ModelError, match="g_idx"):
        opened(tmp_path, tensors, config)


def test_an_unknown_method() -> None:
    with pytest.raises(ModelError, match="'quip'.*fp8"):
        check_readable({"quantization_config": {"quant_method": "quip"}}, "m")


def test_a_whole_model_from_fp8(tmp_path: Path) -> None:
    """The int8 quantizer over an FP8 checkpoint equals it over the dequantized one."""
    from safetensors.torch import load_file

    from bien.core.architectures.registry import read_architecture
    from bien.core.executors.make import make_executor
    from bien.core.providers import Context
    from bien.core.testing.toy import write_toy
    from bien.plugins.parallel.single import Single
    from bien.plugins.quantizers import int8

    plain = write_toy(tmp_path / "plain")
    small = write_toy(tmp_path / "fp8")
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = values[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 448
        tensors[name], tensors[f"{name}_scale"] = (tensor / scale).to(torch.float8_e4m3fn), scale
        values[name] = tensors[name].float() * scale
    save_file(tensors, small / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (small / "config.json").write_text(json.dumps(config))
    outs = []
    for folder in (plain, small):
        quantizer = int8.make(int8.Int8Config(), Context())
        parts = {"quantizer": quantizer, "parallel": Single()}
        model = make_executor(
            Context(architecture=read_architecture(folder, 16, "float32"), parts=parts)
        ).model
        hidden = torch.ones(2, 48)
        outs.append(model.layers[0].feed_forward(hidden))
    assert torch.equal(*outs)
