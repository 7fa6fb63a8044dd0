"""`TinyHybrid`: full attention, sliding window and a gated delta rule in one small decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.architectures.base import Architecture
from bien.core.models.decoder import DecoderLayer
from bien.core.models.feed_forward import FeedForward
from bien.core.models.llama import Llama

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class DeltaMixer:
    """The gated delta rule (Yang, Kautz, Hatamizadeh, "Gated delta networks", 2024), token by token.

    Per head, with keys and queries of length one, decay a in (0, 1) and rate b in (0, 1):

        S <- a S;  S <- S + b (v - S k) k^T;  o = S q

    S is what the layer's KV group keeps, row-major [heads, value, key]; it is float32 in 16-bit models.
    Every rank holds all heads.
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
        decay, rate = torch.exp(-F.softplus(gates[:, : self.heads])), torch.sigmoid(gates[:, self.heads :])
        q, k = (F.normalize(t.to(state.dtype), dim=-1) for t in (q, k))
        mixed, states = scan(state, q, k, v.to(state.dtype), decay, rate, rows)
        rows.store_states(self.layer, states)
        mixed = self.kernels.rms_norm(mixed.to(x.dtype), self.norm, self.eps) * F.silu(gate)
        return self.out(mixed.flatten(1))


_GATE = ("weight", "bias")


def scan(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Run the rule along every sequence of a ragged batch at once, the t-th token of each together.

    state [S, heads, d, d] before the rows; q, k, v [N, heads, d]; decay, rate [N, heads]. Returns the
    outputs [N, heads, d] and the states that `Rows.store_states` wants.
    """
    mixed = torch.empty_like(v)
    keep, ends = rows.keep.astype(np.int64), np.cumsum(rows.keep, dtype=np.int64)
    kept = state.new_empty(int(ends[-1]), *state.shape[1:])
    for t in range(int(rows.counts.max())):
        active = np.flatnonzero(rows.counts > t)
        row, token = (
            torch.from_numpy(active).to(q.device),
            torch.from_numpy(rows.offsets[active] + t).to(q.device),
        )
        key = k[token][..., None, :]
        s = state[row] * decay[token][..., None, None]
        error = v[token] - (s * key).sum(-1)
        s = s + (rate[token][..., None] * error)[..., None] * key
        mixed[token] = (s * q[token][..., None, :]).sum(-1)
        state[row] = s
        # The last `keep` tokens of a row leave their state behind.
        after = t - (rows.counts[active] - keep[active])
        late = np.flatnonzero(after >= 0)
        if len(late):
            place = (ends - keep)[active[late]] + after[late]
            kept[torch.from_numpy(place).to(q.device)] = s[torch.from_numpy(late).to(q.device)]
    return mixed, kept.flatten(1)


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
