"""A small decoder of three token mixers: full attention, sliding window, and a gated delta rule with a
recurrent state. It exists to keep every kind of KV group honest; nobody trains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bien.core.architectures.base import Architecture, AttentionCost
from bien.core.architectures.blocks import embeddings, gated, grouped_query, layer_norms
from bien.core.architectures.fields import ITEM_BYTES, Fields, rope_parameters
from bien.core.architectures.llama import attention_costs
from bien.core.architectures.weights import Weight, linear, norm, total
from bien.core.errors import ModelError
from bien.core.kv.groups import GroupKind, KVGroup, SnapshotPolicy

KINDS = {
    "full_attention": GroupKind.FULL,
    "sliding_attention": GroupKind.WINDOW,
    "linear_attention": GroupKind.STATE,
}


class TinyHybridReader:
    """Writes the layer kinds as transformers does (`layer_types`). A linear layer has `linear_num_heads`
    states of `linear_head_dim` x `linear_head_dim`; states of 16-bit models are kept in float32."""

    model_types: tuple[str, ...] = ("tiny_hybrid",)

    def read(self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str) -> Architecture:
        fields = Fields(config, model)
        fields.positive("rms_norm_eps")
        fields.need("tie_word_embeddings", bool)
        heads, kv_heads, head_dim = fields.heads()
        layers, hidden = fields.layers(), fields.size("hidden_size")
        vocab, inner = fields.size("vocab_size"), fields.size("intermediate_size")
        states, state_dim = fields.size("linear_num_heads"), fields.size("linear_head_dim")
        kinds = _kinds(fields, layers)
        every = fields.size("snapshot_every") if "snapshot_every" in config else 0
        kv_bytes = 2 * kv_heads * head_dim * ITEM_BYTES[dtype]
        state_dtype = dtype if ITEM_BYTES[dtype] >= 4 else "float32"
        state_bytes = states * state_dim * state_dim * ITEM_BYTES[state_dtype]
        groups = []
        for kind in (GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE):
            members = tuple(i for i, k in enumerate(kinds) if k is kind)
            if not members:
                continue
            if kind is GroupKind.STATE:
                group = KVGroup(
                    "state",
                    kind,
                    members,
                    block_tokens,
                    constant_bytes=state_bytes * len(members),
                    croppable=False,
                    snapshot=SnapshotPolicy(every),
                    dtype=state_dtype,
                    shardable=False,
                )
            else:
                window = fields.size("sliding_window") if kind is GroupKind.WINDOW else 0
                size = kv_bytes * len(members)
                group = KVGroup(kind.value, kind, members, block_tokens, size, window=window, dtype=dtype)
            groups.append(group)
        weights = embeddings(vocab, hidden, tied=config["tie_word_embeddings"])
        for i, kind in enumerate(kinds):
            prefix = f"model.layers.{i}."
            if kind is GroupKind.STATE:
                weights += _delta(f"{prefix}linear_attn.", hidden, states, state_dim)
            else:
                weights += grouped_query(f"{prefix}self_attn.", hidden, heads, kv_heads, head_dim)
            weights += gated(f"{prefix}mlp.", hidden, inner) + layer_norms(prefix, hidden)
        return Architecture(
            name="tiny_hybrid",
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
            config=dict(config) | {"rope": rope_parameters(config, model)},
            weights=tuple(weights),
            attention=(
                *attention_costs(
                    [
                        config["sliding_window"] if k is GroupKind.WINDOW else 0
                        for k in kinds
                        if k is not GroupKind.STATE
                    ],
                    heads,
                    head_dim,
                ),
                AttentionCost(
                    layers=kinds.count(GroupKind.STATE),
                    per_position=0,
                    constant=7 * states * state_dim * state_dim,
                ),
            ),
        )


def _delta(prefix: str, hidden: int, states: int, d: int) -> list[Weight]:
    gates = [
        w
        for n in ("decay", "beta")
        for w in linear(f"{prefix}{n}_proj", states, hidden, "attention", bias=True)
    ]
    return [
        *(
            Weight(f"{prefix}{n}_proj.weight", (states * d, hidden), "attention")
            for n in ("q", "k", "v", "gate")
        ),
        *gates[::2],
        *gates[1::2],
        *linear(f"{prefix}o_proj", hidden, states * d, "attention"),
        norm(f"{prefix}norm", d),
    ]


def _kinds(fields: Fields, layers: int) -> list[GroupKind]:
    types = fields.items("layer_types", str)
    for kind in types:
        Fields({"layer_types": kind}, fields.model).only("layer_types", *KINDS)
    if len(types) != layers:
        raise ModelError(
            f"model {fields.model!r}: layer_types names {len(types)} layers, num_hidden_layers says {layers}"
        )
    return [KINDS[kind] for kind in types]


READER = TinyHybridReader()
