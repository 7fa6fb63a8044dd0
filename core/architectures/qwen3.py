"""Qwen3 dense decoders: the Llama shape with an RMSNorm on every query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bien.core.architectures.base import Architecture
from bien.core.architectures.fields import Fields
from bien.core.architectures.llama import dense


class Qwen3Reader:
    """`Qwen3ForCausalLM` as transformers writes it. `head_dim` must be given: it is not hidden/heads."""

    model_types: tuple[str, ...] = ("qwen3",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        Fields(config, model).only("attention_bias", False, True)
        return dense(config, "qwen3", model=model, block_tokens=block_tokens, dtype=dtype, qk_norm=True)
