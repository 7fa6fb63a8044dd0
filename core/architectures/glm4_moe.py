"""GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates a part of each head, DeepSeek-V3's mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bien.core.architectures.base import Architecture
from bien.core.architectures.blocks import gated, sigmoid_mixture
from bien.core.architectures.fields import Fields, rotary_dim
from bien.core.architectures.llama import decoder
from bien.core.architectures.watched import merged
from bien.core.architectures.weights import Weight


class Glm4MoeReader:
    """`Glm4MoeForCausalLM`: the first `first_k_dense_replace` layers are dense; the output projection of
    attention has no bias, whatever the others have."""

    model_types: tuple[str, ...] = ("glm4_moe",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        fields = Fields(config, model)
        fields.need("attention_bias", bool)
        qk_norm = fields.need("use_qk_norm", bool)
        hidden, width = fields.size("hidden_size"), fields.size("intermediate_size")
        further = fields.count("num_nextn_predict_layers", 100)
        dense = fields.count("first_k_dense_replace")
        inner, count, used, shared = fields.sigmoid_mixture()

        def feed_forwards(layer: int, prefix: str) -> list[Weight]:
            if layer < dense:
                return gated(f"{prefix}mlp.", hidden, width)
            return sigmoid_mixture(f"{prefix}mlp.", hidden, inner, count, used, shared)

        return decoder(
            merged(config, {"mlp_bias": False}),
            "glm4_moe",
            model=model,
            block_tokens=block_tokens,
            dtype=dtype,
            qk_norm=qk_norm,
            out_bias=False,
            rotary_dim=rotary_dim(config, model, fields.size("head_dim")),
            further=further,
            feed_forwards=feed_forwards,
        )
