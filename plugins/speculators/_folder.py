"""What config.json of a network drafter says of its layers, and which tensors they need. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bien.core.api import ITEM_BYTES, GroupKind, KVGroup, ModelError, rope_parameters

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


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """A drafter folder's config.json. ModelError where there is none. `kind`: whose, for the message."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise ModelError(
            f"{kind}: {path} {reason}; the folder of a drafter's checkpoint is needed"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{kind}: {path} holds no object")
    return found


def layer_shape(config: Mapping[str, Any], kind: str, folder: Path) -> LayerShape:
    """ModelError for a field that is missing, or says what layers here do not do."""
    hidden = whole(config, "hidden_size", kind, folder)
    heads = whole(config, "num_attention_heads", kind, folder)
    kv_heads = whole(config, "num_key_value_heads", kind, folder, heads)
    head_dim = whole(config, "head_dim", kind, folder, hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{kind}: {folder / 'config.json'} has {heads} heads, {kv_heads} KV heads, {head_dim} "
            "features; heads must be a multiple of KV heads, and features even"
        )
    eps, act = config.get("rms_norm_eps"), config.get("hidden_act", "silu")
    if not isinstance(eps, float | int) or eps <= 0:
        raise ModelError(
            f"{kind}: {folder / 'config.json'} has rms_norm_eps = {eps!r}; needs a number above 0"
        )
    if act != "silu":
        raise ModelError(f"{kind}: {folder / 'config.json'} has hidden_act = {act!r}; valid: 'silu'")
    # What `LlamaConfig` takes where the field is absent, as the makers of these checkpoints leave it.
    rope = rope_parameters({"rope_theta": 10000.0, **config}, str(folder))
    scaled = config.get("rope_parameters") or {}
    part = scaled.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return LayerShape(
        hidden=hidden,
        inner=whole(config, "intermediate_size", kind, folder),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(eps),
        rope=rope,
        rotated=int(head_dim * part) // 2 * 2,
        bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=config.get("model_type") == "qwen3",
    )


def whole(config: Mapping[str, Any], name: str, kind: str, folder: Path, usual: int | None = None) -> int:
    """A positive whole number of a config. `usual`: where it is absent; None: then a ModelError."""
    value = config.get(name)
    if value is None and usual is not None:
        return usual
    if type(value) is not int or value < 1:
        raise ModelError(
            f"{kind}: {folder / 'config.json'} has {name} = {value!r}; needs a whole number above 0"
        )
    return value


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
