"""Parts of decoder layers over flat ragged batches: attention, feed-forward, rotary angles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bien.core.architectures.base import Architecture

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class Rotary:
    """Angles of rotary position embedding, once per step for all layers.

    bien keeps the two members of a rotated pair next to each other (see `paired`), so that the rotation
    is one complex product. Frequencies and angles are float32 whatever the model's dtype, as in
    transformers: checkpoints were trained with that rounding.
    """

    def __init__(self, rope: dict[str, Any], head_dim: int, device: torch.device) -> None:
        """`rope`: what `rope_parameters` read."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequency = 1.0 / (rope["rope_theta"] ** exponent)
        if rope["rope_type"] == "llama3":
            frequency = _llama3(frequency, rope)
        self.frequency = frequency.to(device)

    def angles(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """[N, 1, head_dim / 2] complex cos + i sin of the rows' positions, the same for every head."""
        found: Tensor | None = rows.shared.get(self)
        if found is None:
            angle = rows.positions.float()[:, None, None] * self.frequency
            if dtype is torch.float64:
                angle = angle.double()
            found = rows.shared[self] = torch.polar(torch.ones_like(angle), angle)
        return found


def _llama3(frequency: Tensor, rope: dict[str, Any]) -> Tensor:
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / factor + smooth * frequency
    stretched = torch.where(wavelength > original / low, frequency / factor, frequency)
    inside = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(inside, between, stretched)


def paired(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key projection (or a norm over a head) reordered so that the halves' members
    (j, j + d/2) become neighbours (2j, 2j+1). Products of queries and keys do not change."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


class Attention:
    """Grouped-query attention with rotary embedding; optionally an RMSNorm per head (Qwen3)."""

    def __init__(
        self, prefix: str, layer: int, a: Architecture, source: Checkpoint, parts: ModelParts
    ) -> None:
        """`prefix`: of the checkpoint's names, "model.layers.0.self_attn."."""
        self.layer, self.kernels, self.collect = layer, parts.kernels, parts.strategy.collect
        d = self.head_dim = a.head_dim
        self.kv_heads = len(parts.strategy.kv_shard(a.kv_heads))
        self.scale = d**-0.5
        self.rotary = rotary(a, parts)

        def load(name: str) -> Tensor:
            full = prefix + name
            shape = tuple(source.shape(full))
            return source.take(full, parts.strategy.shard(full, shape))

        bias = bool(a.config.get("attention_bias"))
        q, k, v = (load(f"{n}_proj.weight") for n in "qkv")
        self.heads = len(q) // d
        fused = torch.cat([paired(q, d), paired(k, d), v])
        fused_bias = None
        if bias:
            q, k, v = (load(f"{n}_proj.bias") for n in "qkv")
            fused_bias = torch.cat([paired(q, d), paired(k, d), v])
        make = parts.quantizer.linear
        self.qkv = make(prefix + "qkv_proj", fused, fused_bias)
        self.out = make(prefix + "o_proj", load("o_proj.weight"), _own(load("o_proj.bias")) if bias else None)
        self.norm: Tensor | None = None
        if a.config.get("qk_norm"):
            q, k = paired(load("q_norm.weight"), d), paired(load("k_norm.weight"), d)
            self.norm = torch.cat([q.expand(self.heads, d), k.expand(self.kv_heads, d)])
            self.ones = torch.ones_like(q)
            self.eps = float(a.config["rms_norm_eps"])

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """Normed hidden [N, H] -> [N, H]. Writes the tokens' keys and values, then attends."""
        qkv, query = self.project(x, rows)
        rows.write(self.layer, qkv[:, self.heads * self.head_dim :])
        return self.collect(self.out(rows.attend(self.layer, query, self.scale)), "attention_out")

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
        self.kernels.rope(turned, self.rotary.angles(rows, x.dtype))
        return qkv, heads[:, : self.heads]


class FeedForward:
    """SwiGLU: down(silu(gate) * up)."""

    def __init__(self, prefix: str, a: Architecture, source: Checkpoint, parts: ModelParts) -> None:
        self.kernels, self.collect = parts.kernels, parts.strategy.collect

        def load(name: str) -> Tensor:
            full = prefix + name
            return source.take(full, parts.strategy.shard(full, tuple(source.shape(full))))

        bias = bool(a.config.get("mlp_bias"))
        make = parts.quantizer.linear
        fused = torch.cat([load("gate_proj.weight"), load("up_proj.weight")])
        fused_bias = torch.cat([load("gate_proj.bias"), load("up_proj.bias")]) if bias else None
        self.gate_up = make(prefix + "gate_up_proj", fused, fused_bias)
        down_bias = _own(load("down_proj.bias")) if bias else None
        self.down = make(prefix + "down_proj", load("down_proj.weight"), down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.collect(self.down(self.kernels.silu_mul(self.gate_up(x))), "mlp_out")


def _own(bias: Tensor) -> Tensor | None:
    # Added before the sum over ranks, so only one of them holds it.
    return bias if len(bias) else None


_ROTARY_KEY = "rotary"


def rotary(a: Architecture, parts: ModelParts) -> Rotary:
    """The rotary angles of an architecture; one object for all layers of a model."""
    found: Rotary | None = parts.memo.get(_ROTARY_KEY)
    if found is None:
        found = parts.memo[_ROTARY_KEY] = Rotary(a.config["rope"], a.head_dim, parts.device)
    return found
