"""`Deepseek`: latent attention and a mixture of experts: DeepSeek-V3 and V3.2, GLM-5, Kimi K2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bien.core.architectures.base import Architecture
from bien.core.models.decoder import Decoder, DecoderLayer
from bien.core.models.feed_forward import FeedForward
from bien.core.models.latent_attention import Indexer, LatentAttention
from bien.core.models.mixture import load_sigmoid_mixture

if TYPE_CHECKING:
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class Deepseek(Decoder):
    """`indexer_types` and `mlp_layer_types` of the config (as the reader spells them) say what a layer has;
    layers behind the last one are those for further tokens."""

    def make_layer(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        c, prefix = a.config, f"model.layers.{index}."
        kind, own = c["indexer_types"][index], prefix + "self_attn."
        indexer = Indexer(own + "indexer.", index, a, source, parts) if kind == "full" else None
        attention = LatentAttention(own, index, a, source, parts, indexer, sparse=kind != "none")
        if c["mlp_layer_types"][index] == "dense":
            feed_forward: Any = FeedForward(prefix + "mlp.", source, parts)
        else:
            feed_forward = load_sigmoid_mixture(prefix + "mlp.", c, source, parts)
        return DecoderLayer(index, attention, feed_forward, a, source, parts)
