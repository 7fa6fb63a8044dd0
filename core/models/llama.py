"""`Llama`: decoders of the Llama shape, Qwen3 among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bien.core.architectures.base import Architecture
from bien.core.models.attention import Attention
from bien.core.models.decoder import Decoder, DecoderLayer
from bien.core.models.feed_forward import FeedForward

if TYPE_CHECKING:
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class Llama(Decoder):
    """Grouped-query attention and a gated feed-forward layer."""

    def make_layer(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        prefix = f"model.layers.{index}."
        attention = Attention(prefix + "self_attn.", index, a, source, parts)
        feed_forward = self.make_feed_forward(index, a, source, parts)
        return DecoderLayer(index, attention, feed_forward, a, source, parts)

    def make_feed_forward(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        """What follows attention in layer `index`: [N, H] -> [N, H]."""
        bias = bool(a.config.get("mlp_bias"))
        return FeedForward(f"model.layers.{index}.mlp.", source, parts, bias=bias)
