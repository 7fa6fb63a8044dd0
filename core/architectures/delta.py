"""`DeltaShape`: what `linear_attn_config` says of Kimi Delta Attention: sizes, weights, states, cost."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bien.core.architectures.base import AttentionCost
from bien.core.architectures.fields import ITEM_BYTES, Fields
from bien.core.architectures.weights import Weight, norm
from bien.core.errors import ModelError
from bien.core.kv.groups import GroupKind, KVGroup


class DeltaShape(msgspec.Struct, frozen=True, kw_only=True):
    heads: int
    dim: int  # of a head, keys and values alike
    kernel: int  # inputs that a convolution sees
    lower_bound: float | None  # of the log-decay; None: it has no bound
    full_rank_gate: bool  # the output gate is one product, not two through `dim` features
    speeds: tuple[int, ...]  # the shape that the checkpoint gives to one decay speed per head

    @classmethod
    def read(cls, fields: Fields, *, bounded: bool) -> DeltaShape:
        """From `linear_attn_config` of the config. `bounded`: it must say how the decay is bounded and the
        rank of the gate (Kimi K3); otherwise it may not (Kimi-Linear)."""
        own = linear_fields(fields)
        heads, dim = own.size("num_heads"), own.size("head_dim")
        kernel = own.size("short_conv_kernel_size", 64)
        if kernel < 2:
            own.only("short_conv_kernel_size", *range(2, 9))
        bound, full = None, False
        if bounded:
            bound, full = own.need("gate_lower_bound", float), own.need("use_full_rank_gate", bool)
            if bound >= 0:
                raise ModelError(
                    f"model {own.model!r}: gate_lower_bound = {bound}; needs a negative number: states decay"
                )
        else:
            own.only("gate_lower_bound", None)
            own.only("use_full_rank_gate", None, False)
        return cls(
            heads=heads,
            dim=dim,
            kernel=kernel,
            lower_bound=bound,
            full_rank_gate=full,
            # K3's checkpoint has one entry per head, padded with zeros to the width of a head.
            speeds=(max(heads, dim),) if bounded else (1, 1, heads, 1),
        )

    def weights(self, prefix: str, hidden: int) -> list[Weight]:
        """`prefix`: "model.layers.0.self_attn."."""
        d, width = self.dim, self.heads * self.dim
        gate = {"g_proj": (width, hidden)}
        if not self.full_rank_gate:
            gate = {"g_a_proj": (d, hidden), "g_b_proj": (width, d)}
        shapes = {
            **{f"{n}_proj": (width, hidden) for n in "qkv"},
            **{f"{n}_conv1d": (width, 1, self.kernel) for n in "qkv"},
            "f_a_proj": (d, hidden),
            "f_b_proj": (width, d),
            "b_proj": (self.heads, hidden),
            **gate,
            "o_proj": (hidden, width),
        }
        return [
            *(Weight(f"{prefix}{name}.weight", shape, "attention") for name, shape in shapes.items()),
            Weight(f"{prefix}A_log", self.speeds, "attention", product=False),
            Weight(f"{prefix}dt_bias", (width,), "attention", product=False),
            norm(f"{prefix}o_norm", d),
        ]

    def groups(self, layers: tuple[int, ...], block_tokens: int, dtype: str) -> list[KVGroup]:
        """The recurrent states, in float32 at least, and the last inputs of the convolutions."""
        wide = dtype if ITEM_BYTES[dtype] >= 4 else "float32"
        sizes = (
            ("state", self.heads * self.dim * self.dim, wide),
            ("conv", (self.kernel - 1) * 3 * self.heads * self.dim, dtype),
        )
        return [
            KVGroup(
                name,
                GroupKind.STATE,
                layers,
                block_tokens,
                constant_bytes=elements * ITEM_BYTES[kind] * len(layers),
                croppable=False,
                dtype=kind,
                shardable=False,
            )
            for name, elements, kind in sizes
        ]

    def cost(self, layers: int) -> AttentionCost:
        return AttentionCost(layers=layers, per_position=0, constant=7 * self.heads * self.dim * self.dim)


def linear_fields(fields: Fields) -> Fields:
    """Those of `linear_attn_config`. ModelError when there is none."""
    own = fields.config.get("linear_attn_config")
    if not isinstance(own, Mapping):
        raise ModelError(
            f"model {fields.model!r}: config.json lacks 'linear_attn_config', which decides the architecture"
        )
    return Fields(own, f"{fields.model}: linear_attn_config")


def full_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers with full attention, counted from zero. `linear_attn_config` counts from one, and names the
    layers of either kind; ModelError when that is not each once."""
    own, lists = linear_fields(fields), []
    for name in ("full_attn_layers", "kda_layers"):
        value = own.config.get(name)
        if not isinstance(value, (list, tuple)) or not all(type(i) is int for i in value):
            raise ModelError(
                f"model {own.model!r}: config.json lacks {name!r}, a list of layers counted from one, which "
                f"decides the architecture; found {value!r}"
            )
        lists.append(sorted(value))
    full, linear = lists
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise ModelError(
            f"model {own.model!r}: full_attn_layers = {full} and kda_layers = {linear} must name each layer "
            f"from 1 to {layers} once"
        )
    return tuple(i - 1 for i in full)
