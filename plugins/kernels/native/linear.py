"""Products with packed weights: `LinearMethod`s around the C functions."""

from __future__ import annotations

import torch
from torch import Tensor

from bien.plugins.kernels.native.library import native

LANES = 16  # outputs of a panel of packed weights
ALIGNMENT = 64


class NativeInt8:
    """See `Kernels.int8_linear`; the same bits as torch's."""

    def __init__(self, levels: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = levels.shape
        panels, depth = -(-self.out_features // LANES), -(-self.in_features // 4) * 4
        self._packed = aligned(panels * depth * LANES)
        levels = levels.contiguous()
        native().free.pack_int8(
            levels.data_ptr(), self.out_features, self.in_features, self._packed.data_ptr()
        )
        self._scale = torch.zeros(panels * LANES)
        self._scale[: self.out_features] = scale
        self._bias = None if bias is None else bias.float().contiguous()
        self._run = native().free.linear_int8
        self._weights = (
            self._packed.data_ptr(),
            self._scale.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows = flat(x, self.in_features)
        out = torch.empty(len(rows), self.out_features)
        self._run(
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            self.in_features,
            *self._weights,
            out.data_ptr(),
            self.out_features,
        )
        return like(out, x)


class NativeInt4:
    """See `Kernels.int4_linear`; activations are quantized to int8 per token and group."""

    def __init__(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = levels.shape
        groups = scale.shape[1]
        self._group = self.in_features // groups
        panels = -(-self.out_features // LANES)
        self._packed = aligned(panels * self.in_features * LANES // 2)
        levels = levels.contiguous()
        native().free.pack_int4(
            levels.data_ptr(), self.out_features, self.in_features, self._packed.data_ptr()
        )
        pairs = torch.zeros(panels * LANES, groups, 2, dtype=torch.float16)
        pairs[: self.out_features, :, 0], pairs[: self.out_features, :, 1] = scale, offset
        self._scales = pairs.view(panels, LANES, groups, 2).permute(0, 2, 3, 1).contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._run = native().free.linear_int4
        self._weights = (
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows = flat(x, self.in_features)
        out = torch.empty(len(rows), self.out_features)
        self._run(
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            self.in_features,
            self._group,
            *self._weights,
            out.data_ptr(),
            self.out_features,
        )
        return like(out, x)


def flat(x: Tensor, width: int) -> Tensor:
    """x as [rows, width] float32 whose rows are dense."""
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    if rows.dtype is not torch.float32:  # models of bfloat16 have int8 weights with scales of float32
        rows = rows.float()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def like(out: Tensor, x: Tensor) -> Tensor:
    """The product [rows, out] with x's leading dimensions, in its dtype."""
    if x.dim() != 2:
        out = out.view(*x.shape[:-1], out.shape[1])
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def aligned(size: int) -> Tensor:
    """[size] bytes that begin at a cache line."""
    room = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
    begin = -room.data_ptr() % ALIGNMENT
    return room[begin : begin + size]
