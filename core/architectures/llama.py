"""Llama-shaped decoders: grouped-query attention, rotary embedding, SwiGLU, RMSNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bien.core.architectures.base import Architecture
from bien.core.architectures.fields import Fields, rope_parameters
from bien.core.kv.groups import GroupKind, KVGroup

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


class LlamaReader:
    """`LlamaForCausalLM` as transformers writes it."""

    model_types: tuple[str, ...] = ("llama",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        fields = Fields(config, model)
        fields.only("attention_bias", False, True)
        fields.only("mlp_bias", False, True)
        # The only head size that the shape implies; every other reader needs it written down.
        implied = fields.size("hidden_size") // fields.size("num_attention_heads")
        config = {**config, "head_dim": config.get("head_dim") or implied}
        return dense(config, "llama", model=model, block_tokens=block_tokens, dtype=dtype)


def dense(
    config: Mapping[str, Any], name: str, *, model: str, block_tokens: int, dtype: str, qk_norm: bool = False
) -> Architecture:
    """The architecture of a dense decoder; full and sliding-window layers form one KV group each."""
    fields = Fields(config, model)
    fields.only("hidden_act", "silu")
    fields.need("rms_norm_eps", float)
    fields.need("tie_word_embeddings", bool)
    heads, kv_heads, head_dim = fields.heads()
    layers, hidden = fields.layers(), fields.size("hidden_size")
    vocab = fields.size("vocab_size")
    # One spelling for the torch module, whatever the checkpoint's age.
    config = {**config, "head_dim": head_dim, "rope": rope_parameters(config, model), "qk_norm": qk_norm}
    windows = layer_windows(fields, layers)
    per_layer = 2 * kv_heads * head_dim * ITEM_BYTES[dtype]
    groups = []
    for kind, window in ((GroupKind.FULL, 0), (GroupKind.WINDOW, max(windows))):
        members = tuple(i for i, w in enumerate(windows) if bool(w) == (kind is GroupKind.WINDOW))
        if members:
            size = per_layer * len(members)
            groups.append(KVGroup(kind.value, kind, members, block_tokens, size, window=window, dtype=dtype))
    inner = fields.size("intermediate_size")
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    biases = (head_dim * (heads + 2 * kv_heads) + hidden) * bool(config.get("attention_bias"))
    biases += (2 * inner + hidden) * bool(config.get("mlp_bias"))
    block = attention + 3 * hidden * inner + 2 * hidden + 2 * head_dim * qk_norm + biases
    embeddings = vocab * hidden * (1 if config["tie_word_embeddings"] else 2)
    return Architecture(
        name=name,
        model=model,
        layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        max_context=fields.size("max_position_embeddings"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        parameters=embeddings + layers * block + hidden,
        groups=tuple(groups),
        config=config,
    )


def layer_windows(fields: Fields, layers: int) -> list[int]:
    """Per layer the sliding window in positions, 0 = full attention, from `layer_types`."""
    types = fields.config.get("layer_types")
    if types is None:
        if fields.config.get("use_sliding_window"):
            fields.need("layer_types", str)  # which layers slide is not to be guessed
        return [0] * layers
    known = {"full_attention": 0, "sliding_attention": 1}
    for kind in types:
        Fields({"layer_types": kind}, fields.model).only("layer_types", *known)
    if len(types) != layers:
        Fields({"layer_types": len(types)}, fields.model).only("layer_types", layers)
    sliding = "sliding_attention" in types
    window = fields.size("sliding_window") if sliding else 0
    return [window * known[kind] for kind in types]
