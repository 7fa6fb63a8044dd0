"""`NativeKernels`: float32 on the processor in C++, everything else in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bien.core.api import LinearMethod, TorchKernels
from bien.plugins.kernels.native.attention import AttentionPlan
from bien.plugins.kernels.native.library import native
from bien.plugins.kernels.native.linear import NativeInt4, NativeInt8

if TYPE_CHECKING:
    from bien.core.api import GroupRows

FEW = 64  # tokens for which the C functions of single tokens keep the interpreter: tens of microseconds
HEAD_WIDTHS = (16, 32, 64, 80, 96, 128, 256)
GROUP = 16  # a group of int4 weights is a multiple of it


class NativeKernels(TorchKernels):
    """See `Kernels`. The threads are those of the process: the latest to be made says how many."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._library = native()
        self._library.quick.set_threads(threads)

    def write_kv(self, flat: Tensor, rows: GroupRows, kv: Tensor) -> None:
        if not (_takes(kv) and _takes(flat)) or kv.stride(1) != 1:
            return super().write_kv(flat, rows, kv)
        entries = rows.plans.get("entries")
        if entries is None:
            entries = rows.plans["entries"] = np.ascontiguousarray(rows.entries(), np.int64)
        tokens, width = kv.shape
        run = self._library.quick if tokens < FEW else self._library.free
        run.write_kv(flat.data_ptr(), kv.data_ptr(), kv.stride(0), entries.ctypes.data, tokens, width)

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        tokens, heads, d = query.shape
        pool = rows.pool.layers[layer]
        dense = d in HEAD_WIDTHS and query.stride()[1:] == (d, 1)
        if sinks is not None or rows.skip or not (_takes(query) and _takes(pool) and dense):
            return super().paged_attention(query, rows, layer, scale, sinks)
        kv_heads = pool.shape[-1] // (2 * d)
        plan: AttentionPlan | None = rows.plans.get("native")
        if plan is None:
            piece = self._library.attention_piece
            plan = AttentionPlan.of(rows, piece, kv_heads, heads // kv_heads, d)
            rows.plans["native"] = plan
        out = torch.empty(tokens, heads * d)
        plan.step.scale = scale
        run, arguments = (
            self._library.free,
            (query.data_ptr(), query.stride(0), pool.data_ptr(), out.data_ptr()),
        )
        if plan.short:
            run.attention(plan.address, *arguments)
        if plan.long:
            run.attention_long(plan.address, *arguments)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _takes(x) or not x.is_contiguous():
            return super().rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        width = x.shape[-1]
        tokens = x.numel() // width
        run = self._library.quick if tokens < FEW else self._library.free
        run.rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), tokens, width)
        return out

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not (_takes(x) and x.is_contiguous() and update.is_contiguous()):
            return super().add_rms_norm(x, update, weight, eps)
        total, out = torch.empty_like(x), torch.empty_like(x)
        tokens, width = x.shape
        run = self._library.quick if tokens < FEW else self._library.free
        run.add_rms_norm(
            x.data_ptr(),
            update.data_ptr(),
            weight.data_ptr(),
            eps,
            total.data_ptr(),
            out.data_ptr(),
            tokens,
            width,
        )
        return total, out

    def rope(self, x: Tensor, angles: Tensor) -> None:
        tokens, heads, d = x.shape
        if not _takes(x) or x.stride()[1:] != (d, 1) or not angles.is_contiguous():
            return super().rope(x, angles)
        run = self._library.quick if tokens < FEW else self._library.free
        run.rope(x.data_ptr(), x.stride(0), angles.data_ptr(), tokens, heads, d)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if not _takes(gate_up) or not gate_up.is_contiguous():
            return super().silu_mul(gate_up)
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(tokens, width)
        run = self._library.quick if tokens < FEW else self._library.free
        run.silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, width)
        return out

    def int8_linear(self, levels: Tensor, scale: Tensor, bias: Tensor | None) -> LinearMethod:
        if not _takes(scale):
            return super().int8_linear(levels, scale, bias)
        return NativeInt8(levels, scale, bias)

    def int4_linear(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> LinearMethod:
        if not _takes(scale) or (levels.shape[1] // scale.shape[1]) % GROUP:
            return super().int4_linear(levels, scale, offset, bias)
        return NativeInt4(levels, scale, offset, bias)


def _takes(x: Tensor) -> bool:
    return x.dtype is torch.float32 and not x.is_cuda
