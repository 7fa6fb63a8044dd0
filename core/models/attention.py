"""`Attention`: grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.models.feed_forward import own_bias
from bien.core.models.rotary import paired, rotary

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class Attention:
    """Grouped-query attention with rotary embedding of a head's first `rotary_dim` features (config field of
    the architecture; absent: all); optionally an RMSNorm per head (Qwen3), or sinks (gpt-oss)."""

    def __init__(
        self, prefix: str, layer: int, a: Architecture, source: Checkpoint, parts: ModelParts
    ) -> None:
        """`prefix`: of the checkpoint's names, "model.layers.0.self_attn."."""
        self.layer, self.kernels, self.collect = layer, parts.kernels, parts.strategy.collect
        d = self.head_dim = a.head_dim
        self.kv_heads = len(parts.strategy.kv_shard(a.kv_heads))
        self.scale = d**-0.5
        self.rotated = int(a.config.get("rotary_dim") or d)
        self.rotary = rotary(a.config["rope"], self.rotated, parts)

        def load(name: str) -> Tensor:
            full = prefix + name
            shape = tuple(source.shape(full))
            return source.take(full, parts.strategy.shard(full, shape))

        bias = bool(a.config.get("attention_bias"))
        q, k, v = (load(f"{n}_proj.weight") for n in "qkv")
        self.heads = len(q) // d  # that this rank holds
        fused = torch.cat([self._laid_out(q), self._laid_out(k), v])
        fused_bias = None
        if bias:
            q, k, v = (load(f"{n}_proj.bias") for n in "qkv")
            fused_bias = torch.cat([self._laid_out(q), self._laid_out(k), v])
        make = parts.quantizer.linear
        self.qkv = make(prefix + "qkv_proj", fused, fused_bias)
        out_bias = bool(a.config.get("attention_out_bias", bias))
        self.out = make(
            prefix + "o_proj", load("o_proj.weight"), own_bias(load("o_proj.bias")) if out_bias else None
        )
        self.sinks = load("sinks") if a.config.get("sinks") else None
        self.norm: Tensor | None = None
        if a.config.get("qk_norm"):
            q, k = self._laid_out(load("q_norm.weight")), self._laid_out(load("k_norm.weight"))
            self.norm = torch.cat([q.expand(self.heads, d), k.expand(self.kv_heads, d)])
            self.ones = torch.ones_like(q)
            self.eps = float(a.config["rms_norm_eps"])

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """Normed hidden [N, H] -> [N, H]. Writes the tokens' keys and values, then attends."""
        qkv, query = self.project(x, rows)
        rows.write(self.layer, qkv[:, self.heads * self.head_dim :])
        mixed = rows.attend(self.layer, query, self.scale, self.sinks)
        return self.collect(self.out(mixed), "attention_out")

    def fill(self, x: Tensor, rows: Rows) -> None:
        """Write the tokens' keys and values, and nothing else (drafters that share this layer)."""
        qkv, _ = self.project(x, rows)
        rows.write(self.layer, qkv[:, self.heads * self.head_dim :])

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """(queries, rotated keys and values of every token [N, (heads + 2 kv_heads) d], its query part as
        [N, heads, d]). What follows the queries is the entry that `Rows.write` takes."""
        qkv = self.qkv(x)
        heads = qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = heads[:, : self.heads + self.kv_heads]
        if self.norm is not None:
            turned.copy_(self.kernels.rms_norm(turned, self.ones, self.eps).mul_(self.norm))
        self.kernels.rope(turned[..., : self.rotated], self.rotary.angles(rows, x.dtype))
        return qkv, heads[:, : self.heads]

    def _laid_out(self, weight: Tensor) -> Tensor:
        if self.rotated == self.head_dim:
            return paired(weight, self.head_dim)
        heads = weight.view(-1, self.head_dim, *weight.shape[1:])
        turned = paired(heads[:, : self.rotated].flatten(0, 1), self.rotated).view_as(
            heads[:, : self.rotated]
        )
        return torch.cat([turned, heads[:, self.rotated :]], 1).view(weight.shape)
