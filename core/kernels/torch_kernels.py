"""`TorchKernels`: every operation in plain torch, on any device. The oracle for faster ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.executors.rows import GroupRows
from bien.core.kernels.attention import Segment, attend_segment, plan_attention

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


class TorchKernels:
    """See `Kernels`. Keeps one scratch buffer for gathered keys and values."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def write_kv(self, flat: Tensor, rows: GroupRows, kv: Tensor) -> None:
        target = rows.plans.get("write")
        if target is None:
            target = rows.plans["write"] = _target(rows)
        if isinstance(target, slice):
            flat[target].copy_(kv)
        else:
            flat.index_copy_(0, target, kv.to(flat.dtype))

    def paged_attention(self, query: Tensor, pool: Tensor, rows: GroupRows, scale: float) -> Tensor:
        tokens, heads, d = query.shape
        kv_heads = pool.shape[-1] // (2 * d)
        segments: list[Segment] | None = rows.plans.get("attention")
        if segments is None:
            segments = rows.plans["attention"] = plan_attention(rows, heads // kv_heads, query.dtype)
        if len(segments) == 1 and isinstance(segments[0].query, slice):
            return attend_segment(query, self._entries(pool, segments[0], kv_heads, d), segments[0], scale)
        out = query.new_empty(tokens, heads * d)
        for segment in segments:
            entries = self._entries(pool, segment, kv_heads, d)
            out[segment.query] = attend_segment(query[segment.query], entries, segment, scale)
        return out

    def _entries(self, pool: Tensor, segment: Segment, kv_heads: int, d: int) -> Tensor:
        # [R, L, 2, kv_heads, d]
        if segment.blocks is None:
            return pool.view(1, -1, 2, kv_heads, d)[:, segment.entries]
        need = len(segment.blocks) * pool[0].numel()
        if self._scratch.numel() < need or self._scratch.dtype != pool.dtype:
            self._scratch = torch.empty(need, dtype=pool.dtype, device=pool.device)
        out = self._scratch[:need].view(len(segment.blocks), *pool.shape[1:])
        torch.index_select(pool, 0, segment.blocks, out=out)
        return out.view(segment.sequences, -1, 2, kv_heads, d)[:, segment.entries]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rope(self, x: Tensor, angles: Tensor) -> None:
        if x.dtype in _COMPLEX:
            torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(angles[:, None])
        else:
            turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))).mul_(angles[:, None])
            x.copy_(torch.view_as_real(turned).flatten(-2))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


def _target(rows: GroupRows) -> slice | Tensor:
    entries = rows.entries()
    first, last = int(entries[0]), int(entries[-1])
    if last - first + 1 == len(entries) and bool((entries[1:] - entries[:-1] == 1).all()):
        return slice(first, last + 1)
    return rows.mapping
