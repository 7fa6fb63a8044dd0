"""Llama-shaped decoders: grouped-query attention, rotary embedding, SwiGLU, RMSNorm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bien.core.architectures.base import Architecture, AttentionCost
from bien.core.architectures.blocks import (
    embeddings,
    gated,
    grouped_query,
    layer_norms,
    predicting_layer,
)
from bien.core.architectures.fields import ITEM_BYTES, Fields, rope_parameters
from bien.core.architectures.watched import merged
from bien.core.architectures.weights import Weight, total
from bien.core.kv.groups import GroupKind, KVGroup


class LlamaReader:
    """`LlamaForCausalLM` as transformers writes it."""

    model_types: tuple[str, ...] = ("llama",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        fields = Fields(config, model)
        fields.only("attention_bias", False, True)
        fields.only("mlp_bias", False, True)
        # The only head size that the shape implies; every other reader needs it written down.
        implied = fields.size("hidden_size") // fields.size("num_attention_heads")
        if config.get("head_dim") is None:
            config = merged(config, {"head_dim": implied})
        return decoder(config, "llama", model=model, block_tokens=block_tokens, dtype=dtype)


FeedForwards = Callable[[int, str], list[Weight]]
"""(layer, prefix "model.layers.0.") -> the weights of what follows attention there."""


def decoder(
    config: Mapping[str, Any],
    name: str,
    *,
    model: str,
    block_tokens: int,
    dtype: str,
    qk_norm: bool = False,
    out_bias: bool | None = None,
    rotary_dim: int = 0,
    sinks: bool = False,
    further: int = 0,
    feed_forwards: FeedForwards | None = None,
) -> Architecture:
    """The architecture of a decoder with grouped-query attention; full and sliding-window layers form one KV
    group each. The keywords say what the module `Attention` is to do, and what follows it (by default the
    gated layer "mlp." of `intermediate_size`). `further` layers behind the last predict further tokens."""
    fields = Fields(config, model)
    fields.activation("silu")
    fields.positive("rms_norm_eps")
    fields.need("tie_word_embeddings", bool)
    heads, kv_heads, head_dim = fields.heads()
    layers, hidden = fields.layers(), fields.size("hidden_size")
    vocab = fields.size("vocab_size")
    # One spelling for the torch module, whatever the checkpoint's age.
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    out_bias = bias if out_bias is None else out_bias
    config = dict(config) | {
        "head_dim": head_dim,
        "rope": rope_parameters(config, model),
        "qk_norm": qk_norm,
        "attention_out_bias": out_bias,
        "rotary_dim": rotary_dim or head_dim,
        "sinks": sinks,
    }
    windows = layer_windows(fields, layers)
    per_layer = 2 * kv_heads * head_dim * ITEM_BYTES[dtype]
    groups = []
    for kind, window in ((GroupKind.FULL, 0), (GroupKind.WINDOW, max(windows))):
        members = tuple(i for i, w in enumerate(windows) if bool(w) == (kind is GroupKind.WINDOW))
        if members:
            size = per_layer * len(members)
            groups.append(KVGroup(kind.value, kind, members, block_tokens, size, window=window, dtype=dtype))
    if feed_forwards is None:
        inner = fields.size("intermediate_size")

        def feed_forwards(layer: int, prefix: str) -> list[Weight]:
            return gated(f"{prefix}mlp.", hidden, inner, bias=mlp_bias)

    weights = embeddings(vocab, hidden, tied=config["tie_word_embeddings"])
    for i in range(layers + further):
        prefix = f"model.layers.{i}."
        own = f"{prefix}self_attn."
        layer = grouped_query(
            own, hidden, heads, kv_heads, head_dim, bias=bias, out_bias=out_bias, qk_norm=qk_norm
        )
        if sinks:
            layer.append(Weight(f"{own}sinks", (heads,), "attention", product=False))
        layer += feed_forwards(i, prefix) + layer_norms(prefix, hidden)
        weights += layer if i < layers else predicting_layer(prefix, vocab, hidden, layer)
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
        parameters=total(weights),
        groups=tuple(groups),
        config=config,
        weights=tuple(weights),
        attention=attention_costs(windows, heads, head_dim),
    )


def attention_costs(windows: list[int], heads: int, head_dim: int) -> tuple[AttentionCost, ...]:
    """Of grouped-query layers with these windows (0 = full): scores and mix, two operations each."""
    sizes = sorted(set(windows))
    return tuple(
        AttentionCost(layers=windows.count(w), per_position=4 * heads * head_dim, cap=w) for w in sizes
    )


def layer_windows(fields: Fields, layers: int) -> list[int]:
    """Per layer the sliding window in positions, 0 = full attention, from `layer_types`."""
    config = fields.config
    slides = config.get("use_sliding_window") is not None and fields.need("use_sliding_window", bool)
    if config.get("layer_types") is None:
        if slides:
            fields.need("layer_types", str)  # which layers slide is not to be guessed
        if "use_sliding_window" in config:
            fields.aside("sliding_window", "max_window_layers")
        return [0] * layers
    fields.aside("sliding_window", "max_window_layers")
    types = fields.items("layer_types", str)
    known = {"full_attention": 0, "sliding_attention": 1}
    for kind in types:
        Fields({"layer_types": kind}, fields.model).only("layer_types", *known)
    if len(types) != layers:
        Fields({"layer_types": len(types)}, fields.model).only("layer_types", layers)
    sliding = "sliding_attention" in types
    window = fields.size("sliding_window") if sliding else 0
    return [window * known[kind] for kind in types]
