"""The int8 product of torch: imported by the factory only, since it needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import LinearMethod

LEVELS = 127.0
# CUDA's int8 product takes more than 16 rows, and widths that are multiples of 8.
CUDA_ROWS, CUDA_WIDTH = 17, 8


class FullLinear:
    """A layer that is kept in full precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class Int8Linear:
    """round(x / a) @ round(w / b) in int32, times a (per token) and b (per output channel)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        # In float32 at least: the scale of a bfloat16 weight would be as coarse as the weight.
        wide = weight if weight.dtype == torch.float64 else weight.float()
        scale = (wide.abs().amax(1, keepdim=True) / LEVELS).clamp_(min=torch.finfo(wide.dtype).tiny)
        levels = (wide / scale).round_().to(torch.int8)
        if weight.device.type == "cuda":
            levels = F.pad(levels, (0, -self.in_features % CUDA_WIDTH, 0, -self.out_features % CUDA_WIDTH))
        self._levels = levels.t()  # [in, out], column-major as the product wants it
        self._scale = scale.t().contiguous()  # [1, out]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        wide = rows if rows.dtype == self._scale.dtype else rows.to(self._scale.dtype)
        tiny = torch.finfo(wide.dtype).tiny
        scale = (wide.abs().amax(1, keepdim=True) / LEVELS).clamp_(min=tiny)
        levels = (wide / scale).round_().to(torch.int8)
        out = torch.mul(self._product(levels), scale).mul_(self._scale)
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _product(self, levels: Tensor) -> Tensor:
        tokens = len(levels)
        if not tokens:
            return torch.empty(0, self.out_features, dtype=torch.int32, device=levels.device)
        if levels.device.type == "cuda":
            levels = F.pad(levels, (0, -self.in_features % CUDA_WIDTH, 0, max(0, CUDA_ROWS - tokens)))
        return torch._int_mm(levels, self._levels)[:tokens, : self.out_features]


class Int8Quantizer:
    """See `Quantizer`. Reads full-precision checkpoints and quantizes them while loading."""

    def __init__(self, *, head: bool) -> None:
        self._head = head

    def matches(self, config: Mapping[str, Any]) -> bool:
        return not config.get("quantization_config")

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearMethod:
        full = name == "embed_tokens" or (name == "lm_head" and not self._head)
        return FullLinear(weight, bias) if full else Int8Linear(weight, bias)

    def close(self) -> None:
        pass
