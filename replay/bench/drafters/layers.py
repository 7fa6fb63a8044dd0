"""What tiny targets and drafters are made of: dense and differentiable, whole sequences at once, no cache.

Names and layouts are those of the checkpoints that bien reads: what is trained here is saved as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Of a layer of the Llama or Qwen3 kind."""

    hidden: int = 96
    inner: int = 256
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    theta: float = 10000.0
    eps: float = 1e-6
    normed: bool = False  # queries and keys, per head (Qwen3)

    def config(self) -> dict[str, object]:
        """The fields of config.json that say so."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.theta,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 4096,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        if shape.normed:
            self.q_norm = RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, keyed: Tensor, at: Tensor, keyed_at: Tensor, mask: Tensor) -> Tensor:
        """x [B, Q, H] at positions `at` [B, Q] looks at `keyed` [B, K, H] at `keyed_at`; mask [B, Q, K]."""
        d = self.shape.head_dim
        query, key, value = (
            part.unflatten(-1, (-1, d)).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(keyed), self.v_proj(keyed))
        )
        if self.shape.normed:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = turned(query, at, self.shape.theta), turned(key, keyed_at, self.shape.theta)
        found = F.scaled_dot_product_attention(query, key, value, mask[:, None], enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(
        self, x: Tensor, context: Tensor | None, at: Tensor, keyed_at: Tensor, mask: Tensor
    ) -> Tensor:
        """`context` [B, C, H] (not normed here) comes before what is looked at: x itself."""
        normed = self.input_layernorm(x)
        keyed = normed if context is None else torch.cat([context, normed], 1)
        x = x + self.self_attn(normed, keyed, at, keyed_at, mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def turned(x: Tensor, at: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [B, heads, L, d] at positions [B, L]: member j turns with member j + d/2."""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = (at[:, None, :, None] * speed).to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def started(module: nn.Module, seed: int, spread: float = 0.02) -> None:
    """Fill weights: matrices normal, norms one, biases zero."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, spread, generator=source)
            elif name.endswith("bias"):
                weight.zero_()
