"""`KimiLinear`: delta and latent attention without positions, and experts: Kimi-Linear, Kimi K3."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.architectures.kimi_linear import EXPERT_NAMES
from bien.core.models.attention_residual import AttentionResidual, ResidualLayer, banked
from bien.core.models.decoder import Decoder, DecoderLayer
from bien.core.models.delta_attention import DeltaAttention
from bien.core.models.feed_forward import FeedForward, SiTU
from bien.core.models.latent_attention import LatentAttention
from bien.core.models.mixture import LatentExperts, Mixture, load_experts, load_sigmoid_mixture

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts, Tap


class KimiLinear(Decoder):
    """The config, as the reader spells it, says which parts there are."""

    def __init__(self, a: Architecture, source: Checkpoint, parts: ModelParts) -> None:
        self.activation = None
        if a.config["hidden_act"] == "situ":
            self.activation = SiTU(a.config["activation_situ_beta"], a.config["activation_situ_linear_beta"])
        super().__init__(a, source, parts)
        self.last: AttentionResidual | None = None
        if a.config["attn_res_block_size"]:
            self.last = AttentionResidual("model.output_attn_res", a, source, parts)

    def make_layer(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        c, prefix = a.config, f"model.layers.{index}."
        mixer = LatentAttention if index in c["full_layers"] else DeltaAttention
        feed_forward: Any = None
        if index < c["dense_layers"]:
            feed_forward = FeedForward(prefix + "mlp.", source, parts, activation=self.activation)
        else:
            feed_forward = self._mixture(prefix + "block_sparse_moe.", a, source, parts)
        layer = ResidualLayer if c["attn_res_block_size"] else DecoderLayer
        own = mixer(prefix + "self_attn.", index, a, source, parts)
        return layer(index, own, feed_forward, a, source, parts)

    def forward(
        self, tokens: Tensor, rows: Rows, wanted: Collection[Tap] = ()
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """See `CausalModel`. With attention residuals the hidden states at taps are running sums."""
        hidden, taps = super().forward(tokens, rows, wanted)
        if self.last is not None:
            hidden = self.last(hidden, banked(rows))
        return hidden, taps

    def _mixture(self, prefix: str, a: Architecture, source: Checkpoint, parts: ModelParts) -> Mixture:
        c = a.config
        own = f"{prefix}experts."
        experts = load_experts(own, c["n_routed_experts"], source, parts, self.activation, EXPERT_NAMES)
        if c["routed_expert_hidden_size"]:
            experts = LatentExperts(prefix, experts, source, parts, float(c["rms_norm_eps"]))
        return load_sigmoid_mixture(prefix, c, source, parts, activation=self.activation, experts=experts)
