"""What config.json of a network drafter says of its layers, and which tensors they need. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from bien.core.api import ITEM_BYTES, GroupKind, KVGroup, ModelError, rope_parameters
from bien.plugins.speculators._fields import Fields

Shapes = dict[str, tuple[int, ...]]
"""Tensors by name."""


class LayerShape(msgspec.Struct, frozen=True):
    """A decoder layer of the Llama or Qwen3 shape, as a drafter's config.json says it."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: dict[str, Any]
    rotated: int  # a head's first features, which are rotated
    bias: bool = False  # of the attention's projections
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def entry(self) -> int:
        """Elements of a position's keys and values."""
        return 2 * self.kv_heads * self.head_dim


def layer_shape(fields: Fields) -> LayerShape:
    """ModelError for a field that is missing, or says what layers here do not do."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    head_dim = fields.whole("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise ModelError(
            f"{fields.kind}: {fields.path} has {heads} heads, {kv_heads} KV heads, {head_dim} features; "
            "heads must be a multiple of KV heads, and features even"
        )
    if (act := fields.find("hidden_act")) not in (None, "silu"):
        raise fields.wrong("hidden_act", act, "", "valid: 'silu'")
    # What `LlamaConfig` takes where the field is absent, as the makers of these checkpoints leave it.
    given = {name: fields.find(name) for name in ("rope_theta", "rope_parameters", "rope_scaling")}
    rope = rope_parameters(
        {"rope_theta": 10000.0} | {n: v for n, v in given.items() if v is not None}, str(fields.path.parent)
    )
    scaled = fields.within(fields.object("rope_parameters"), *fields.places)
    part = scaled.number("partial_rotary_factor", 1.0, most=1.0)
    rotated = int(head_dim * part)
    if not rotated or rotated % 2:
        needs = f"a share that rotates an even number of a head's {head_dim} features, not {rotated}"
        raise scaled.wrong("partial_rotary_factor", part, needs)
    return LayerShape(
        hidden=hidden,
        inner=fields.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=fields.number("rms_norm_eps"),
        rope=rope,
        rotated=rotated,
        bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=fields.find("model_type") == "qwen3",
    )


def check_full_attention(fields: Fields) -> None:
    """ModelError for a layer that does not see the whole context."""
    kinds = fields.names("layer_types") or []
    if fields.flag("use_sliding_window", False) or "sliding_attention" in kinds:
        raise ModelError(
            f"{fields.kind}: {fields.path} has a layer with a sliding window; valid: full attention"
        )
    if any(kind != "full_attention" for kind in kinds):
        raise fields.wrong("layer_types", kinds, "", "valid: 'full_attention'")


def attention_shapes(prefix: str, a: LayerShape, inputs: int = 0) -> Shapes:
    """Tensors of `Attention`. `prefix`: "layers.0.self_attn."; `inputs`: features that enter, by default
    the hidden size."""
    inputs = inputs or a.hidden
    sizes = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
    shapes: Shapes = {f"{prefix}{n}_proj.weight": (size, inputs) for n, size in sizes.items()}
    shapes[f"{prefix}o_proj.weight"] = (a.hidden, a.heads * a.head_dim)
    if a.bias:
        shapes |= {f"{prefix}{n}_proj.bias": (size,) for n, size in sizes.items()}
        shapes[f"{prefix}o_proj.bias"] = (a.hidden,)
    if a.qk_norm:
        shapes |= {f"{prefix}{n}_norm.weight": (a.head_dim,) for n in "qk"}
    return shapes


def mlp_shapes(prefix: str, a: LayerShape) -> Shapes:
    """Tensors of `Mlp`. `prefix`: "layers.0.mlp."."""
    sizes = {"gate": (a.inner, a.hidden), "up": (a.inner, a.hidden), "down": (a.hidden, a.inner)}
    shapes: Shapes = {f"{prefix}{n}_proj.weight": size for n, size in sizes.items()}
    if a.mlp_bias:
        shapes |= {f"{prefix}{n}_proj.bias": size[:1] for n, size in sizes.items()}
    return shapes


def norm_shapes(width: int, *names: str) -> Shapes:
    """Weights of RMS norms."""
    return {f"{name}.weight": (width,) for name in names}


def draft_group(name: str, width: int, layers: int, like: KVGroup) -> KVGroup:
    """A drafter's own group: `width` elements per position and layer, blocks and dtype as those of `like`.
    Not divided among ranks: each computes the whole drafter."""
    size = width * layers * ITEM_BYTES[like.dtype]
    return KVGroup(
        name,
        GroupKind.DRAFT,
        tuple(range(layers)),
        like.block_tokens,
        size,
        dtype=like.dtype,
        shardable=False,
    )
