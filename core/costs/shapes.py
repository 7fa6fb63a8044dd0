"""`Shape`: what a model costs, of which nothing here can compute a logit. It becomes an `Architecture` whose
weights bear sizes only: good for `StepModel`, refused by whatever loads a model (no `config`)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from bien.core.architectures.base import Architecture, AttentionCost
from bien.core.architectures.blocks import embeddings, experts, gated, grouped_query, layer_norms
from bien.core.architectures.fields import ITEM_BYTES
from bien.core.architectures.weights import Weight, linear, total
from bien.core.errors import UserError, nearest
from bien.core.kv.groups import GroupKind, KVGroup

FOLDER = Path(__file__).parent / "shapes"
Count = Annotated[int, msgspec.Meta(ge=1)]
Maybe = Annotated[int, msgspec.Meta(ge=0)]


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Grouped-query decoder, dense or with experts, some of whose layers keep a state instead of a cache."""

    layers: Count
    hidden: Count
    vocab: Count
    max_context: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    gated_queries: bool = False  # the query product also yields a gate for the output
    inner: Maybe = 0  # of dense feed-forward layers; 0: all have experts
    experts: Maybe = 0
    experts_used: Maybe = 0
    expert_inner: Maybe = 0
    shared_inner: Maybe = 0
    attention_every: Count = 1  # layer i attends when i + 1 is a multiple; the others keep a state
    state_heads: Maybe = 0  # values' heads of a gated delta net
    state_key_heads: Maybe = 0
    state_dim: Maybe = 0

    def architecture(self, name: str, block_tokens: int, dtype: str) -> Architecture:
        """Sizes only: `config` is empty and no module computes it."""
        attending = [i for i in range(self.layers) if (i + 1) % self.attention_every == 0]
        keeping = [i for i in range(self.layers) if (i + 1) % self.attention_every]
        weights = embeddings(self.vocab, self.hidden, tied=False)
        for i in range(self.layers):
            prefix = f"model.layers.{i}."
            mixer = self._attention(prefix) if i in set(attending) else self._delta(prefix)
            weights += mixer + self._feed_forward(f"{prefix}mlp.") + layer_norms(prefix, self.hidden)
        costs = [
            AttentionCost(layers=len(attending), per_position=4 * self.heads * self.head_dim),
        ]
        size = 2 * self.kv_heads * self.head_dim * ITEM_BYTES[dtype] * len(attending)
        groups = [KVGroup("full", GroupKind.FULL, tuple(attending), block_tokens, size, dtype=dtype)]
        if keeping:
            elements = self.state_heads * self.state_dim * self.state_dim
            costs.append(AttentionCost(layers=len(keeping), per_position=0, constant=7 * elements))
            groups.append(
                KVGroup(
                    "state",
                    GroupKind.STATE,
                    tuple(keeping),
                    block_tokens,
                    constant_bytes=4 * elements * len(keeping),
                    croppable=False,
                    dtype="float32",
                    shardable=False,
                )
            )
        return Architecture(
            name="shape",
            model=name,
            layers=self.layers,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            max_context=self.max_context,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            parameters=total(weights),
            groups=tuple(groups),
            weights=tuple(weights),
            attention=tuple(costs),
        )

    def _attention(self, prefix: str) -> list[Weight]:
        own = f"{prefix}self_attn."
        weights = grouped_query(own, self.hidden, self.heads, self.kv_heads, self.head_dim, qk_norm=True)
        if self.gated_queries:
            weights += linear(f"{own}gate", self.heads * self.head_dim, self.hidden, "attention")
        return weights

    def _delta(self, prefix: str) -> list[Weight]:
        own, d = f"{prefix}linear_attn.", self.state_dim
        keys, values = self.state_key_heads * d, self.state_heads * d
        return [
            *linear(f"{own}in_proj_qkv", 2 * keys + values, self.hidden, "attention"),
            *linear(f"{own}in_proj_z", values, self.hidden, "attention"),
            *linear(f"{own}in_proj_ba", 2 * self.state_heads, self.hidden, "attention"),
            *linear(f"{own}out_proj", self.hidden, values, "attention"),
        ]

    def _feed_forward(self, prefix: str) -> list[Weight]:
        if not self.experts:
            return gated(prefix, self.hidden, self.inner)
        weights = linear(f"{prefix}gate", self.experts, self.hidden, "router")
        weights += experts(
            f"{prefix}experts.", self.hidden, self.expert_inner, self.experts, self.experts_used
        )
        if self.shared_inner:
            weights += gated(f"{prefix}shared_expert.", self.hidden, self.shared_inner, "shared")
        return weights


def shapes() -> list[str]:
    """The shapes that are known by name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_shape(name: str | Path) -> Shape:
    """A known shape, or one from a TOML file. UserError names the file and what is wrong in it."""
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in shapes():
            raise UserError(
                f"no shape {str(name)!r}; {nearest(str(name), shapes())}, or the path of a .toml file"
            )
        path = FOLDER / f"{name}.toml"
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Shape)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UserError(f"shape {path}: {error}", field="model") from None
