"""Kimi-Linear and Kimi K3: delta attention with a recurrent state in most layers, latent attention without
positions in the others, a mixture of experts; in K3 over latents, with attention residuals and bounded gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bien.core.architectures.base import Architecture, AttentionCost
from bien.core.architectures.blocks import embeddings, experts, gated, latent, layer_norms, sigmoid_mixture
from bien.core.architectures.delta import DeltaShape, full_layers
from bien.core.architectures.fields import ITEM_BYTES, Fields, nested_text
from bien.core.architectures.watched import merged
from bien.core.architectures.weights import Weight, linear, norm, total
from bien.core.kv.groups import GroupKind, KVGroup

EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up, down
LATENT_NORM_EPS = 1e-6  # of the norms inside latent attention, whatever `rms_norm_eps` says of the others
# As DeepSeek-V3 names what these models name otherwise; the shared layers know the former.
_RENAMED = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
# What K3's config must have and Kimi-Linear's does not.
_K3: dict[str, type] = {
    "activation_situ_beta": float,
    "activation_situ_linear_beta": float,
    "attn_res_block_size": int,
    "latent_moe_use_norm": bool,
    "mla_use_output_gate": bool,
    "routed_expert_hidden_size": int,
}


class KimiLinearReader:
    """`KimiLinearForCausalLM` as Moonshot AI writes it, and the text model of
    `KimiK3ForConditionalGeneration` (`text_config`), which "situ" for an activation tells from it."""

    model_types: tuple[str, ...] = ("kimi_linear", "kimi_k3")

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        name = config["model_type"]
        text = nested_text(config, model, "kimi_linear") if name == "kimi_k3" else config
        fields = Fields(text, model)
        k3 = fields.activation(*(["situ"] if name == "kimi_k3" else ["silu", "situ"])) == "situ"
        layers, hidden = fields.layers(), fields.size("hidden_size")
        vocab, heads = fields.size("vocab_size"), fields.size("num_attention_heads")
        inner, dense = fields.size("intermediate_size"), fields.count("first_k_dense_replace")
        fields.positive("rms_norm_eps")
        _supported(fields, heads)
        delta, full = DeltaShape.read(fields, bounded=k3), full_layers(fields, layers)
        mixture, text = _mixture(fields)
        sizes = _sizes(fields)
        features = _features(fields, k3=k3)
        text = dict(text) | {
            **features,
            "delta": msgspec.structs.asdict(delta),
            "full_layers": full,
            "dense_layers": dense,
            "rope": None,
            "attention_scale": (sizes["nope"] + sizes["rope"]) ** -0.5,
            "latent_norm_eps": LATENT_NORM_EPS,
            "output_gate": features["mla_use_output_gate"],
        }
        weights = embeddings(vocab, hidden, tied=fields.need("tie_word_embeddings", bool))
        for i in range(layers):
            prefix = f"model.layers.{i}."
            own = f"{prefix}self_attn."
            if i not in full:
                weights += delta.weights(own, hidden)
            else:
                weights += latent(own, hidden, heads, **sizes)
                if features["mla_use_output_gate"]:
                    weights += linear(f"{own}g_proj", heads * sizes["value"], hidden, "attention")
            if i < dense:
                weights += gated(f"{prefix}mlp.", hidden, inner)
            else:
                weights += _experts(f"{prefix}block_sparse_moe.", hidden, mixture, features)
            weights += layer_norms(prefix, hidden)
            if k3:
                weights += _residual(f"{prefix}self_attention_res", hidden)
                weights += _residual(f"{prefix}mlp_res", hidden)
        if k3:
            weights += _residual("model.output_attn_res", hidden)
        width, linear_layers = sizes["rank"] + sizes["rope"], tuple(i for i in range(layers) if i not in full)
        size = width * ITEM_BYTES[dtype] * len(full)
        entries = KVGroup("latent", GroupKind.LATENT, full, block_tokens, size, dtype=dtype, shardable=False)
        groups = (entries, *delta.groups(linear_layers, block_tokens, dtype))
        return Architecture(
            name=name,
            model=model,
            layers=layers,
            hidden_size=hidden,
            vocab_size=vocab,
            max_context=fields.either("model_max_length", "max_position_embeddings"),
            heads=heads,
            kv_heads=heads,
            head_dim=sizes["nope"] + sizes["rope"],
            parameters=total(weights),
            groups=tuple(g for g in groups if g.layers),
            config=text,
            weights=tuple(weights),
            attention=(
                AttentionCost(layers=len(full), per_position=2 * heads * (sizes["rank"] + width)),
                delta.cost(len(linear_layers)),
            ),
        )


def _supported(fields: Fields, heads: int) -> None:
    fields.need("mla_use_nope", bool)
    fields.only("mla_use_nope", True)
    fields.need("moe_router_activation_func", str)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("num_key_value_heads", heads)
    fields.only("topk_method", "noaux_tc")
    fields.only("use_grouped_topk", True)
    fields.only("moe_layer_freq", 1)
    fields.only("num_nextn_predict_layers", 0)
    fields.only("attention_bias", False)
    fields.aside("head_dim", "rope_theta", "rope_scaling", "rope_parameters")  # nothing is rotated


def _features(fields: Fields, *, k3: bool) -> dict[str, Any]:
    if not k3:
        for name in _K3:
            fields.only(name, None, False)
        return dict.fromkeys(_K3)
    return {name: _feature(fields, name, kind) for name, kind in _K3.items()}


def _feature(fields: Fields, name: str, kind: type) -> Any:
    read = {int: fields.size, float: fields.positive}.get(kind)
    return read(name) if read else fields.need(name, kind)


def _mixture(fields: Fields) -> tuple[tuple[int, int, int, int], Mapping[str, Any]]:
    common = fields.config
    for own, shared in _RENAMED.items():
        if shared not in common:
            common = merged(common, {shared: fields.need(own, bool if own == "moe_renormalize" else int)})
    return Fields(common, fields.model).sigmoid_mixture(), common


def _sizes(fields: Fields) -> dict[str, Any]:
    if "q_lora_rank" not in fields.config:
        fields.need("q_lora_rank", int)
    return {
        "q_rank": None if fields.config["q_lora_rank"] is None else fields.size("q_lora_rank"),
        "rank": fields.size("kv_lora_rank"),
        "nope": fields.size("qk_nope_head_dim"),
        "rope": fields.size("qk_rope_head_dim"),
        "value": fields.size("v_head_dim"),
    }


def _experts(
    prefix: str, hidden: int, mixture: tuple[int, int, int, int], features: Mapping[str, Any]
) -> list[Weight]:
    inner, count, used, _ = mixture
    width = features["routed_expert_hidden_size"]
    routed = experts(f"{prefix}experts.", width or hidden, inner, count, used, EXPERT_NAMES)
    if width:
        routed += linear(f"{prefix}routed_expert_down_proj", width, hidden, "shared")
        routed += linear(f"{prefix}routed_expert_up_proj", hidden, width, "shared")
        if features["latent_moe_use_norm"]:
            routed.append(norm(f"{prefix}routed_expert_norm", width))
    return sigmoid_mixture(prefix, hidden, *mixture, routed=routed)


def _residual(name: str, hidden: int) -> list[Weight]:
    return [norm(f"{name}_norm", hidden), Weight(f"{name}_proj.weight", (1, hidden), "attention")]
