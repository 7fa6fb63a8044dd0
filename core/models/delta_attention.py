"""`DeltaAttention`: Kimi Delta Attention (KDA), the gated delta rule behind a short convolution.

Kimi Team, "Kimi Linear: an expressive, efficient attention architecture" (2025). A sequence has two states,
each in a KV group of its own: the last inputs of the convolution, and what the rule has learnt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.architectures.base import Architecture
from bien.core.models.delta_rule import delta_rule

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts

STATE, CONV = "state", "conv"  # names of the KV groups


class DeltaAttention:
    """Per head: q, k, v = SiLU of causal depthwise convolutions; queries and keys of length one; a decay per
    channel, sigmoid rate; RMSNorm of the output times a sigmoid gate.

    Config fields, all in `delta` (see `kimi_linear`): heads, dim, kernel, lower_bound (None: log-decay
    -exp(A) softplus(f + bias); else lower_bound * sigmoid(exp(A) (f + bias))), full_rank_gate.
    """

    def __init__(
        self, prefix: str, layer: int, a: Architecture, source: Checkpoint, parts: ModelParts
    ) -> None:
        """`prefix`: "model.layers.0.self_attn."."""
        c = a.config["delta"]
        self.layer, self.kernels, self.collect = layer, parts.kernels, parts.strategy.collect
        self.heads, self.dim, self.kernel = c["heads"], c["dim"], c["kernel"]
        self.bound, self.eps = c["lower_bound"], float(a.config["rms_norm_eps"])
        self.wide = torch.float64 if parts.dtype == torch.float64 else torch.float32

        def weight(*names: str) -> Tensor:
            return torch.cat([source.take(f"{prefix}{n}.weight") for n in names])

        make = parts.quantizer.linear
        self.qkv = make(prefix + "qkv_proj", weight("q_proj", "k_proj", "v_proj"), None)
        taps = torch.cat([source.take(f"{prefix}{n}_conv1d.weight", wide=True) for n in "qkv"])
        self.taps = taps[:, 0].t().contiguous()  # [kernel, channels], the newest input last
        gate = ("g_proj",) if c["full_rank_gate"] else ("g_a_proj", "g_b_proj")
        self.gate = [make(prefix + n, weight(n), None) for n in gate]
        self.out = make(prefix + "o_proj", weight("o_proj"), None)
        # Small, and too delicate for a quantizer.
        self.low, self.decay, self.rate = weight("f_a_proj"), weight("f_b_proj"), weight("b_proj")
        # A checkpoint may pad one entry per head with zeros, or spell it [1, 1, heads, 1].
        speed = source.take(f"{prefix}A_log", wide=True).flatten()[: self.heads]
        self.speed = speed.exp()[:, None]
        self.bias = source.take(f"{prefix}dt_bias", wide=True)
        self.norm = source.take(f"{prefix}o_norm.weight", wide=True)

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """Normed hidden [N, H] -> [N, H]. Continues from, and stores, the rows' states."""
        mixed = self._convolved(self.qkv(x), rows)
        q, k, v = mixed.view(-1, 3, self.heads, self.dim).unbind(1)
        state = rows.load_states(self.layer, STATE).view(-1, self.heads, self.dim, self.dim)
        rate = torch.sigmoid(F.linear(x, self.rate)).to(self.wide)
        found, states = delta_rule(state, _unit(q) * self.dim**-0.5, _unit(k), v, self._decay(x), rate, rows)
        rows.store_states(self.layer, states, STATE)
        gate = x
        for product in self.gate:
            gate = product(gate)
        gate = torch.sigmoid(gate.to(self.wide)).view_as(found)
        heads = (self.kernels.rms_norm(found, self.norm, self.eps) * gate).to(x.dtype)
        return self.collect(self.out(heads.flatten(1)), "attention_out")

    def _decay(self, x: Tensor) -> Tensor:
        # [N, heads, dim] log-decay of every key channel.
        f = F.linear(F.linear(x, self.low), self.decay).to(self.wide) + self.bias
        f = f.view(-1, self.heads, self.dim)
        if self.bound is None:
            return -self.speed * F.softplus(f)
        bounded: Tensor = self.bound * torch.sigmoid(self.speed * f)
        return bounded

    def _convolved(self, inputs: Tensor, rows: Rows) -> Tensor:
        # [N, channels], in float32 at least, as the taps are.
        before, channels = self.kernel - 1, inputs.shape[1]
        places = _places(rows, before)
        line = inputs.new_empty(rows.tokens + before * len(rows.counts), channels)
        line[places.tokens] = inputs
        line[places.remembered] = rows.load_states(self.layer, CONV).view(-1, before, channels)
        width = len(line) - before
        out = line[:width] * self.taps[0]
        for j in range(1, self.kernel):
            out.addcmul_(line[j : j + width].to(self.wide), self.taps[j])
        rows.store_states(self.layer, line[places.kept].flatten(1), CONV)
        return F.silu(out[places.tokens - before])


class _Places(NamedTuple):
    # Inputs of a convolution in one line: each sequence's tokens behind the inputs that its state remembers.
    #     [ s s s a a a a a | s s s b | ... ]
    tokens: Tensor  # [N]
    remembered: Tensor  # [S, kernel - 1]
    kept: Tensor  # [sum(keep), kernel - 1] the states after a row's last `keep` tokens: inputs up to each


def _places(rows: Rows, before: int) -> _Places:
    # The same for all layers of a step.
    key = ("places of inputs", before)
    found: _Places | None = rows.shared.get(key)
    if found is None:
        sequence, keep = np.arange(len(rows.counts)), rows.keep.astype(np.int64)
        tokens = np.arange(rows.tokens) + (np.repeat(sequence, rows.counts) + 1) * before
        first = rows.offsets[:-1] + sequence * before
        late = np.repeat(rows.offsets[1:] - np.cumsum(keep), keep) + np.arange(int(keep.sum()))
        arrays = (
            tokens,
            first[:, None] + np.arange(before),
            tokens[late][:, None] + np.arange(1 - before, 1),
        )
        found = rows.shared[key] = _Places(*(torch.from_numpy(x).to(rows.device) for x in arrays))
    return found


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
