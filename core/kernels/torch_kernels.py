"""`TorchKernels`: every operation in plain torch, on any device. The oracle for faster ones."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.executors.pools import Pool
from bien.core.executors.rows import GroupRows
from bien.core.kernels.attention import Gathered, Scratch, Segment, attend, attend_runs, plan_attention
from bien.core.kernels.block import block_attention
from bien.core.kernels.latent import choose, latent_attention
from bien.core.kernels.quantized import Int4Linear, Int8Linear
from bien.core.kernels.sinks import attend_with_sinks
from bien.core.quantization.quantizer import LinearMethod

_COMPLEX = (torch.float32, torch.float64)


class TorchKernels:
    """See `Kernels`. Keeps one scratch buffer for gathered keys and values."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def write_kv(self, flat: Tensor, rows: GroupRows, kv: Tensor) -> None:
        target = rows.plans.get("write")
        if target is None:
            target = rows.plans["write"] = _target(rows)
        if type(target) is slice:
            flat[target] = kv
        else:
            flat.index_copy_(0, target, kv.to(flat.dtype))

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        tokens, heads, d = query.shape
        keys, values = _views(rows.pool, layer, d)
        kv_heads = keys.shape[1]
        segments: list[Segment] | None = rows.plans.get("attention")
        if segments is None:
            share = heads // kv_heads
            segments = plan_attention(rows, kv_heads, share, query.dtype, self._scratch)
            rows.plans["attention"] = segments
        grouped = query.view(tokens, kv_heads, heads // kv_heads, d)
        out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        for segment in segments:
            where, key, value = segment.entries, keys, values
            run = attend if sinks is None else partial(attend_with_sinks, sinks=sinks)
            if isinstance(where, Gathered):
                torch.index_select(rows.pool.layers[layer], 0, where.blocks, out=where.into)
                key, value = where.key, where.value
            elif len(where) == 1:
                ((first, length),) = where
                key, value = keys.narrow(2, first, length), values.narrow(2, first, length)
            elif sinks is None:
                run = attend_runs
            if segment.query is None:  # the whole step
                run(grouped, key, value, segment, scale, out)
            elif type(segment.query) is slice:
                run(grouped[segment.query], key, value, segment, scale, out[segment.query])
            else:
                part = torch.empty_like(grouped[segment.query])
                run(grouped[segment.query], key, value, segment, scale, part)
                out[segment.query] = part
        if rows.skip:
            rows.blank(out)
        return out.view(tokens, heads * d)

    def block_attention(
        self,
        query: Tensor,
        kv: Tensor,
        rows: GroupRows,
        layer: int,
        scale: float,
        mask: Tensor | None,
        positions: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return block_attention(query, kv, rows, layer, scale, mask, positions, sinks)

    def latent_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, rank: int, chosen: Tensor | None
    ) -> Tensor:
        return latent_attention(query, rows, layer, scale, rank, chosen)

    def choose(self, query: Tensor, weights: Tensor, rows: GroupRows, layer: int, count: int) -> Tensor:
        return choose(query, weights, rows, layer, count)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + update
        return total, torch.rms_norm(total, weight.shape, weight, eps)

    def rope(self, x: Tensor, angles: Tensor) -> None:
        tokens, heads, d = x.shape
        if x.dtype in _COMPLEX:
            torch.view_as_complex(x.view(tokens, heads, d // 2, 2)).mul_(angles)
        else:
            turned = torch.view_as_complex(x.float().view(tokens, heads, d // 2, 2)).mul_(angles)
            x.copy_(torch.view_as_real(turned).flatten(-2))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        return F.silu(gate_up.narrow(-1, 0, width)).mul_(gate_up.narrow(-1, width, width))

    def int8_linear(self, levels: Tensor, scale: Tensor, bias: Tensor | None) -> LinearMethod:
        return Int8Linear(levels, scale, bias)

    def int4_linear(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> LinearMethod:
        return Int4Linear(levels, scale, offset, bias)

    def close(self) -> None:
        pass


def _target(rows: GroupRows) -> slice | Tensor:
    entries = rows.entries()
    first, last = int(entries[0]), int(entries[-1])
    if last - first + 1 == len(entries) and bool((entries[1:] - entries[:-1] == 1).all()):
        return slice(first, last + 1)
    return rows.mapping


def _views(pool: Pool, layer: int, d: int) -> tuple[Tensor, Tensor]:
    # Keys and values of all entries of a layer, each [1, kv_heads, entries, d].
    found: tuple[Tensor, Tensor] | None = pool.views.get((layer, d))
    if found is None:
        entries = pool.layers[layer].view(1, -1, 2, pool.layers[layer].shape[-1] // (2 * d), d)
        key, value = entries.permute(2, 0, 3, 1, 4).unbind(0)
        found = pool.views[layer, d] = (key, value)
    return found
