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
        feed_forward = FeedForward(prefix + "mlp.", source, parts, bias=bool(a.config.get("mlp_bias")))
        return DecoderLayer(index, attention, feed_forward, a, source, parts)
