"""Linear products over quantized weights in plain torch: the oracles for faster ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LEVELS = 127.0
# CUDA's int8 product takes more than 16 rows, and widths that are multiples of 8.
CUDA_ROWS, CUDA_WIDTH = 17, 8


class Int8Linear:
    """round(x / a) @ levels in int32, times a (per token) and scale (per output channel)."""

    def __init__(self, levels: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = levels.shape
        if levels.device.type == "cuda":
            levels = F.pad(levels, (0, -self.in_features % CUDA_WIDTH, 0, -self.out_features % CUDA_WIDTH))
        self._levels = levels.t()  # [in, out], column-major as the product wants it
        self._scale = scale[None].contiguous()  # [1, out]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        levels, scale = int8_levels(rows if rows.dtype == self._scale.dtype else rows.to(self._scale.dtype))
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


class Int4Linear:
    """x @ (scale * level + offset).T, the weights kept as dense as they came: two levels per byte. They are
    expanded for each product, which saves memory and costs time; activations stay as they are."""

    def __init__(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = levels.shape
        self._packed = levels[:, ::2] | (levels[:, 1::2] << 4)
        self._dtype, self._bias = scale.dtype, bias
        self._scale, self._offset = scale[..., None].half(), offset[..., None].half()

    def __call__(self, x: Tensor) -> Tensor:
        levels = torch.stack((self._packed & 15, self._packed >> 4), -1)
        scale, offset = self._scale.to(self._dtype), self._offset.to(self._dtype)
        weight = torch.addcmul(offset, levels.view(self.out_features, scale.shape[1], -1), scale)
        weight = weight.view(self.out_features, self.in_features).to(x.dtype)
        return F.linear(x, weight, self._bias)


def int8_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] floats -> (levels [R, K] int8, scale [R, 1]): x is nearly levels * scale, symmetric per row."""
    scale = (x.abs().amax(1, keepdim=True) / LEVELS).clamp_(min=torch.finfo(x.dtype).tiny)
    return (x / scale).round_().to(torch.int8), scale
