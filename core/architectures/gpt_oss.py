"""gpt-oss: layers that slide and layers that see everything, by turns, with attention sinks; every layer a
mixture whose experts lie in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bien.core.architectures.base import Architecture
from bien.core.architectures.fields import Fields
from bien.core.architectures.llama import decoder
from bien.core.architectures.watched import merged
from bien.core.architectures.weights import Weight, linear

ALPHA = 1.702  # of the gate; checkpoints from before it became a field have this one


class GptOssReader:
    """`GptOssForCausalLM`."""

    model_types: tuple[str, ...] = ("gpt_oss",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        fields = Fields(config, model)
        fields.need("attention_bias", bool)
        fields.positive("swiglu_limit")
        if config.get("layer_types") is None:
            fields.need("layer_types", str)  # which layers slide is not to be guessed
        hidden, inner = fields.size("hidden_size"), fields.size("intermediate_size")
        count = fields.either("num_local_experts", "num_experts")
        used = fields.size("num_experts_per_tok", count)
        fields.only("experts_per_token", used)
        alpha = ALPHA if config.get("swiglu_alpha") is None else fields.positive("swiglu_alpha")

        def feed_forwards(layer: int, prefix: str) -> list[Weight]:
            def routed(name: str, *shape: int) -> Weight:
                product = len(shape) == 2
                full = f"{prefix}mlp.experts.{name}"
                return Weight(full, shape, "routed", count, used, product=product, stacked=True)

            return [
                *linear(f"{prefix}mlp.router", count, hidden, "router", bias=True),
                routed("gate_up_proj", hidden, 2 * inner),
                routed("gate_up_proj_bias", 2 * inner),
                routed("down_proj", inner, hidden),
                routed("down_proj_bias", hidden),
            ]

        return decoder(
            merged(config, {"num_local_experts": count, "swiglu_alpha": alpha}),
            "gpt_oss",
            model=model,
            block_tokens=block_tokens,
            dtype=dtype,
            sinks=True,
            feed_forwards=feed_forwards,
        )
