"""The levels of int4 weights: imported by the factory only, since it needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bien.core.api import Kernels, LinearMethod, ModelError
from bien.plugins.quantizers._rows import FullLinear, int8_rows

TOP = 15.0  # levels are 0..15
GROUPS = (128, 64, 32, 16)


class Int4Quantizer:
    """See `Quantizer`. Reads full-precision checkpoints and quantizes them while loading, each group to the
    range between its smallest and its largest weight (asymmetric min-max, as GGUF's Q4_1 does)."""

    def __init__(self, kernels: Kernels, *, group: int, head: str) -> None:
        self._kernels, self._group, self._head = kernels, group, head

    def matches(self, config: Mapping[str, Any]) -> bool:
        return not config.get("quantization_config")

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearMethod:
        kind = {"embed_tokens": "none", "lm_head": self._head}.get(name, "int4")
        if kind == "none":
            return FullLinear(weight, bias)
        if kind == "int8":
            return self._kernels.int8_linear(*int8_rows(weight), bias)
        levels, scale, offset = int4_groups(weight, self._fitting(name, weight.shape[1]))
        return self._kernels.int4_linear(levels, scale, offset, bias)

    def close(self) -> None:
        pass

    def _fitting(self, name: str, width: int) -> int:
        for group in GROUPS:
            if group <= self._group and width % group == 0:
                return group
        raise ModelError(
            f"layer {name!r} has {width} inputs; int4 weights need a multiple of {GROUPS[-1]}; valid: "
            "another quantizer"
        )


def int4_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """[out, in] -> (levels [out, in] uint8 of 0..15, scale and offset [out, in / group] of the values that
    float16 holds): weight is nearly scale * level + offset."""
    dtype = weight.dtype
    wide = weight.to(torch.float64 if dtype == torch.float64 else torch.float32)
    grouped = wide.view(len(weight), -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale, offset = ((high - low) / TOP).half().to(wide.dtype), low.half().to(wide.dtype)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))  # a constant group has scale 0
    levels = ((grouped - offset[..., None]) / divisor[..., None]).round_().clamp_(0, TOP).to(torch.uint8)
    return levels.view(weight.shape), scale.to(dtype), offset.to(dtype)
