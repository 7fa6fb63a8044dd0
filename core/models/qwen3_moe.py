"""`Qwen3Moe`: Qwen3's attention, with a mixture of experts in most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bien.core.architectures.base import Architecture
from bien.core.models.llama import Llama
from bien.core.models.mixture import Mixture, SoftmaxRouter, load_experts

if TYPE_CHECKING:
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class Qwen3Moe(Llama):
    """See `CausalModel`."""

    def make_feed_forward(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        if index in a.config["dense_layers"]:
            return super().make_feed_forward(index, a, source, parts)
        prefix, c = f"model.layers.{index}.mlp.", a.config
        router = SoftmaxRouter(
            source.take(f"{prefix}gate.weight"), c["num_experts_per_tok"], renormalize=c["norm_topk_prob"]
        )
        experts = load_experts(f"{prefix}experts.", c["num_experts"], source, parts)
        return Mixture(router, experts, parts)
