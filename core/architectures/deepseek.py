"""Decoders of the DeepSeek-V3 shape: latent attention, a mixture of experts behind dense layers; with an
indexer that chooses positions (V3.2, GLM-5), whose choice layers may share (GLM-5.2); Kimi K2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bien.core.architectures.base import Architecture, AttentionCost
from bien.core.architectures.blocks import (
    embeddings,
    gated,
    indexer,
    latent,
    layer_norms,
    predicting_layer,
    sigmoid_mixture,
)
from bien.core.architectures.fields import ITEM_BYTES, Fields, nested_text, rope_parameters, yarn_scale
from bien.core.architectures.watched import merged
from bien.core.architectures.weights import Weight, total
from bien.core.errors import ModelError
from bien.core.kv.groups import GroupKind, KVGroup

SPARSE = ("deepseek_v32", "glm_moe_dsa")
HALVES = "indexer_rope_interleave"  # False: the indexer's rotated pairs lie half a head apart
NORM_EPS = 1e-6  # of the norms inside attention, whatever `rms_norm_eps` says of those around it


class DeepseekReader:
    """`DeepseekV3ForCausalLM`, `DeepseekV32ForCausalLM` and `GlmMoeDsaForCausalLM` as transformers and their
    makers write them, Kimi K2, and the text model of `KimiK25ForConditionalGeneration`."""

    model_types: tuple[str, ...] = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "kimi_k25")

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        name = config["model_type"]
        if name == "kimi_k25":
            tied = {n: config[n] for n in ("tie_word_embeddings",) if n in config}
            config = merged(nested_text(config, model, "kimi_k2", "deepseek_v3"), tied)
        fields = Fields(config, model)
        fields.positive("rms_norm_eps")
        fields.need("tie_word_embeddings", bool)
        kind = fields.need("model_type", str)
        layers, hidden = fields.layers(), fields.size("hidden_size")
        vocab, heads = fields.size("vocab_size"), fields.size("num_attention_heads")
        fields.activation("silu")
        fields.only("num_key_value_heads", heads)
        fields.only("attention_bias", False, True)
        fields.only("scoring_func", "sigmoid")
        fields.only("topk_method", "noaux_tc")
        inner, mixture = fields.size("intermediate_size"), fields.sigmoid_mixture()
        further = fields.further()
        types = _kinds(fields, layers, further, sparse=kind in SPARSE)
        sizes = _sizes(fields, sparse=kind in SPARSE)
        fields.only("qk_head_dim", sizes["nope"] + sizes["rope"])
        fields.only("moe_router_dtype", "float32")
        fields.aside("index_share_for_mtp_iteration")  # of drafts, which decide no text
        config = dict(config) | {
            **types,
            "n_routed_experts": mixture[1],
            "rope": (rope := rope_parameters(config, model)),
            "attention_scale": _scale(sizes["nope"] + sizes["rope"], rope),
            "latent_norm_eps": NORM_EPS,
            "rope_interleave": _flag(fields, "rope_interleave", True),
            HALVES: _flag(fields, HALVES, kind == "glm_moe_dsa"),
        }
        weights = embeddings(vocab, hidden, tied=config["tie_word_embeddings"])
        for i in range(layers + further):
            layer = _layer(config, i, hidden, heads, sizes)
            if config["mlp_layer_types"][i] == "dense":
                layer += gated(f"model.layers.{i}.mlp.", hidden, inner)
            else:
                layer += sigmoid_mixture(f"model.layers.{i}.mlp.", hidden, *mixture)
            weights += layer if i < layers else predicting_layer(f"model.layers.{i}.", vocab, hidden, layer)
        full = tuple(i for i in range(layers) if types["indexer_types"][i] == "full")
        groups, cost = _cache(config, layers, full, heads, sizes, block_tokens, dtype)
        return Architecture(
            name=name,
            model=model,
            layers=layers,
            hidden_size=hidden,
            vocab_size=vocab,
            max_context=fields.size("max_position_embeddings"),
            heads=heads,
            kv_heads=heads,
            head_dim=sizes["nope"] + sizes["rope"],
            parameters=total(weights),
            groups=groups,
            config=config,
            weights=tuple(weights),
            attention=cost,
        )


def drafting_groups(a: Architecture) -> tuple[KVGroup, ...]:
    """The groups of a drafter that runs the layers for further tokens: entries as in the model's own groups,
    for the layers behind its last one. Their names: "mtp-" and the name of the model's group."""
    further = range(a.layers, a.layers + (a.config.get("num_nextn_predict_layers") or 0))
    return tuple(
        msgspec.structs.replace(
            g,
            name=f"mtp-{g.name}",
            kind=GroupKind.DRAFT,
            layers=tuple(further),
            bytes_per_token=g.bytes_per_token // len(g.layers) * len(further),
        )
        for g in a.groups
    )


def _sizes(fields: Fields, *, sparse: bool) -> dict[str, Any]:
    if "q_lora_rank" not in fields.config:
        fields.need("q_lora_rank", int)
    plain = fields.config["q_lora_rank"] is None and not sparse  # an indexer reads the queries' latent
    sizes = {"q_rank": None if plain else fields.size("q_lora_rank"), "value": fields.size("v_head_dim")}
    for short, name in (
        ("rank", "kv_lora_rank"),
        ("nope", "qk_nope_head_dim"),
        ("rope", "qk_rope_head_dim"),
    ):
        size = sizes[short] = fields.size(name)
        if size % 2:
            raise ModelError(f"model {fields.model!r}: {name} = {size} is odd; rotary embedding needs pairs")
    if sparse:
        fields.size("index_n_heads")
        fields.size("index_topk")
        narrow, rotated = fields.size("index_head_dim"), fields.size("qk_rope_head_dim")
        if narrow < rotated:
            raise ModelError(
                f"model {fields.model!r}: index_head_dim = {narrow} is less than the qk_rope_head_dim = "
                f"{rotated} features that are rotated"
            )
    return sizes


def _kinds(fields: Fields, layers: int, further: int, *, sparse: bool) -> dict[str, list[str]]:
    # Per layer, those for further tokens included, which attend and mix as sparse layers do.
    given = fields.config.get("mlp_layer_types")
    fields.only("moe_layer_freq", 1)
    fields.aside("first_k_dense_replace")
    if given is None:
        dense = fields.count("first_k_dense_replace")
        given = ["dense" if i < dense else "sparse" for i in range(layers)]
    mlp = _per_layer(fields, "mlp_layer_types", given, layers, "dense", "sparse")
    chosen = ["none"] * layers
    if sparse:
        chosen = _per_layer(fields, "indexer_types", _schedule(fields, layers), layers, "full", "shared")
        if chosen[0] == "shared":
            raise ModelError(
                f"model {fields.model!r}: layer 0 shares a choice of positions, but none is before it"
            )
    return {
        "mlp_layer_types": mlp + ["sparse"] * further,
        "indexer_types": chosen + [("full" if sparse else "none")] * further,
    }


def _schedule(fields: Fields, layers: int) -> Any:
    config = fields.config
    if config.get("indexer_types") is not None:
        return config["indexer_types"]
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    scheduled = config.get("index_skip_topk_offset") is not None
    if config.get("index_topk_freq") is None and not scheduled:
        return ["full"] * layers
    every = fields.size("index_topk_freq")
    if every == 1:
        return ["full"] * layers
    first = fields.count("index_skip_topk_offset")
    return ["full" if max(i - first + 1, 0) % every == 0 else "shared" for i in range(layers)]


def _per_layer(fields: Fields, name: str, given: Any, layers: int, *choices: str) -> list[str]:
    if not isinstance(given, (list, tuple)) or len(given) != layers:
        raise ModelError(f"model {fields.model!r}: {name} = {given!r}; needs one of {choices} per layer")
    for kind in given:
        Fields({name: kind}, fields.model).only(name, *choices)
    return list(given)


def _flag(fields: Fields, name: str, usual: bool) -> bool:
    fields.only(name, usual, not usual)
    return bool(fields.config.get(name, usual))


def _scale(width: int, rope: Mapping[str, Any]) -> float:
    # YaRN's temperature is on queries and keys alike, hence squared.
    over = rope.get("mscale_all_dim") if rope["rope_type"] == "yarn" else None
    return float(width**-0.5 * (yarn_scale(rope["factor"], over) ** 2 if over else 1.0))


def _layer(config: Mapping[str, Any], i: int, hidden: int, heads: int, sizes: dict[str, Any]) -> list[Weight]:
    prefix = f"model.layers.{i}."
    bias = bool(config.get("attention_bias"))
    weights = latent(f"{prefix}self_attn.", hidden, heads, **sizes, bias=bias)
    if config["indexer_types"][i] == "full":
        own = f"{prefix}self_attn.indexer."
        weights += indexer(own, hidden, sizes["q_rank"], config["index_n_heads"], config["index_head_dim"])
    return weights + layer_norms(prefix, hidden)


def _cache(
    config: Mapping[str, Any],
    layers: int,
    full: tuple[int, ...],
    heads: int,
    sizes: dict[str, Any],
    block_tokens: int,
    dtype: str,
) -> tuple[tuple[KVGroup, ...], tuple[AttentionCost, ...]]:
    # One latent per position and layer for all heads; of layers with an indexer, its key.
    def group(name: str, kind: GroupKind, members: tuple[int, ...], width: int) -> KVGroup:
        size = width * ITEM_BYTES[dtype] * len(members)
        return KVGroup(name, kind, members, block_tokens, size, dtype=dtype, shardable=False)

    rank, rope = sizes["rank"], sizes["rope"]
    groups = [group("latent", GroupKind.LATENT, tuple(range(layers)), rank + rope)]
    cap = config["index_topk"] if full else 0
    costs = [AttentionCost(layers=layers, per_position=2 * heads * (2 * rank + rope), cap=cap)]
    if full:
        narrow, d = config["index_n_heads"], config["index_head_dim"]
        groups.append(group("indexer", GroupKind.INDEXER, full, d))
        costs.append(AttentionCost(layers=len(full), per_position=2 * narrow * d))
    return tuple(groups), tuple(costs)
