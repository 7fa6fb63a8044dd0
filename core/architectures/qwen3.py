"""Qwen3 decoders: the Llama shape with an RMSNorm on every query and key head; dense, or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bien.core.architectures.base import Architecture
from bien.core.architectures.blocks import experts, gated
from bien.core.architectures.fields import Fields
from bien.core.architectures.llama import decoder
from bien.core.architectures.watched import merged
from bien.core.architectures.weights import Weight, linear


class Qwen3Reader:
    """`Qwen3ForCausalLM` as transformers writes it. `head_dim` must be given: it is not hidden/heads."""

    model_types: tuple[str, ...] = ("qwen3",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        Fields(config, model).only("attention_bias", False, True)
        return decoder(config, "qwen3", model=model, block_tokens=block_tokens, dtype=dtype, qk_norm=True)


class Qwen3MoeReader:
    """`Qwen3MoeForCausalLM`: layers of `mlp_only_layers`, and those that `decoder_sparse_step` leaves out,
    are dense."""

    model_types: tuple[str, ...] = ("qwen3_moe",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        fields = Fields(config, model)
        fields.only("attention_bias", False, True)
        hidden, step = fields.size("hidden_size"), fields.size("decoder_sparse_step")
        count = fields.either("num_experts", "num_local_experts")
        used = fields.size("num_experts_per_tok", count)
        fields.only("qkv_bias", False)
        fields.only("shared_expert_intermediate_size", 0)
        inner = fields.size("moe_intermediate_size")
        fields.need("norm_topk_prob", bool)
        layers = fields.layers()
        dense = {i for i in range(layers) if (i + 1) % step}
        if config.get("mlp_only_layers") is not None:
            dense |= set(fields.items("mlp_only_layers", int))
        fields.aside("intermediate_size")
        width = fields.size("intermediate_size") if dense else 0

        def feed_forwards(layer: int, prefix: str) -> list[Weight]:
            if layer in dense:
                return gated(f"{prefix}mlp.", hidden, width)
            router = linear(f"{prefix}mlp.gate", count, hidden, "router")
            return router + experts(f"{prefix}mlp.experts.", hidden, inner, count, used)

        return decoder(
            merged(config, {"num_experts": count, "dense_layers": sorted(dense)}),
            "qwen3_moe",
            model=model,
            block_tokens=block_tokens,
            dtype=dtype,
            qk_norm=True,
            feed_forwards=feed_forwards,
        )
