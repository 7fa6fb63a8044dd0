"""`Glm4Moe`: dense layers first, then mixtures with shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bien.core.architectures.base import Architecture
from bien.core.models.llama import Llama
from bien.core.models.mixture import load_sigmoid_mixture

if TYPE_CHECKING:
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class Glm4Moe(Llama):
    """See `CausalModel`."""

    def make_feed_forward(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        if index < a.config["first_k_dense_replace"]:
            return super().make_feed_forward(index, a, source, parts)
        return load_sigmoid_mixture(f"model.layers.{index}.mlp.", a.config, source, parts)
