"""Weights of the parts that decoders share: what `bien.core.models` has a layer for, by the same names."""

from __future__ import annotations

from bien.core.architectures.weights import Role, Weight, linear, norm


def embeddings(vocab: int, hidden: int, *, tied: bool) -> list[Weight]:
    """Embedding, final norm and output head. A tied head is the embedding: multiplied, and stored once."""
    table = Weight(
        "model.embed_tokens.weight", (vocab, hidden), "head" if tied else "embedding", product=tied
    )
    head = [] if tied else [Weight("lm_head.weight", (vocab, hidden), "head")]
    return [table, norm("model.norm", hidden), *head]


def grouped_query(
    prefix: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    d: int,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: bool = False,
) -> list[Weight]:
    """Grouped-query attention. `prefix`: "model.layers.0.self_attn."; `out_bias` None: like `bias`."""
    weights = [
        *linear(f"{prefix}q_proj", heads * d, hidden, "attention", bias=bias),
        *linear(f"{prefix}k_proj", kv_heads * d, hidden, "attention", bias=bias),
        *linear(f"{prefix}v_proj", kv_heads * d, hidden, "attention", bias=bias),
        *linear(
            f"{prefix}o_proj", hidden, heads * d, "attention", bias=bias if out_bias is None else out_bias
        ),
    ]
    if qk_norm:
        weights += [norm(f"{prefix}{name}_norm", d) for name in "qk"]
    return weights


def gated(prefix: str, hidden: int, inner: int, role: Role = "dense", *, bias: bool = False) -> list[Weight]:
    """A gated feed-forward layer: gate, up and down projections. `prefix`: "model.layers.0.mlp."."""
    return [
        *linear(f"{prefix}gate_proj", inner, hidden, role, bias=bias),
        *linear(f"{prefix}up_proj", inner, hidden, role, bias=bias),
        *linear(f"{prefix}down_proj", hidden, inner, role, bias=bias),
    ]


def experts(prefix: str, width: int, inner: int, count: int, used: int) -> list[Weight]:
    """`count` gated experts, of which a token uses `used`. `prefix`: "model.layers.0.mlp.experts."."""
    shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return [Weight(f"{prefix}{{}}.{n}.weight", s, "routed", count, used) for n, s in shapes.items()]


def layer_norms(prefix: str, hidden: int) -> list[Weight]:
    """The norms before attention and before the feed-forward layer. `prefix`: "model.layers.0."."""
    return [norm(f"{prefix}input_layernorm", hidden), norm(f"{prefix}post_attention_layernorm", hidden)]
