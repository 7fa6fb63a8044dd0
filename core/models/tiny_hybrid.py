"""`TinyHybrid`: full attention, sliding window and a gated delta rule in one small decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.architectures.base import Architecture
from bien.core.models.decoder import DecoderLayer
from bien.core.models.delta_rule import delta_rule
from bien.core.models.feed_forward import FeedForward
from bien.core.models.llama import Llama

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class DeltaMixer:
    """The gated delta rule with one decay per head, keys and queries of length one.

    Its state is what the layer's KV group keeps, row-major [heads, value, key]; it is float32 in 16-bit
    models. Every rank holds all heads.
    """

    def __init__(
        self, prefix: str, layer: int, a: Architecture, source: Checkpoint, parts: ModelParts
    ) -> None:
        self.layer, self.kernels = layer, parts.kernels
        self.heads, self.dim = a.config["linear_num_heads"], a.config["linear_head_dim"]
        self.eps = float(a.config["rms_norm_eps"])
        make = parts.quantizer.linear
        names = ("q", "k", "v", "gate")
        fused = torch.cat([source.take(f"{prefix}{n}_proj.weight") for n in names])
        self.qkvg = make(prefix + "qkvg_proj", fused, None)
        self.out = make(prefix + "o_proj", source.take(prefix + "o_proj.weight"), None)
        gates = [torch.cat([source.take(f"{prefix}{n}_proj.{p}") for n in ("decay", "beta")]) for p in _GATE]
        self.gates_weight, self.gates_bias = gates  # tiny, and too delicate for a quantizer
        self.norm = source.take(prefix + "norm.weight")

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """Normed hidden [N, H] -> [N, H]. Continues from, and stores, the rows' states."""
        q, k, v, gate = self.qkvg(x).view(-1, 4, self.heads, self.dim).unbind(1)
        state = rows.load_states(self.layer).view(-1, self.heads, self.dim, self.dim)
        gates = F.linear(x, self.gates_weight, self.gates_bias).to(state.dtype)
        decay, rate = -F.softplus(gates[:, : self.heads, None]), torch.sigmoid(gates[:, self.heads :])
        q, k = (F.normalize(t.to(state.dtype), dim=-1) for t in (q, k))
        mixed, states = delta_rule(state, q, k, v.to(state.dtype), decay, rate, rows)
        rows.store_states(self.layer, states)
        mixed = self.kernels.rms_norm(mixed.to(x.dtype), self.norm, self.eps) * F.silu(gate)
        return self.out(mixed.flatten(1))


_GATE = ("weight", "bias")


class TinyHybrid(Llama):
    """Llama's layers, and `DeltaMixer`s in place of attention among them."""

    def make_layer(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        if a.config["layer_types"][index] != "linear_attention":
            return super().make_layer(index, a, source, parts)
        prefix = f"model.layers.{index}."
        mixer = DeltaMixer(prefix + "linear_attn.", index, a, source, parts)
        return DecoderLayer(
            index,
            mixer,
            FeedForward(prefix + "mlp.", source, parts, bias=bool(a.config.get("mlp_bias"))),
            a,
            source,
            parts,
        )
