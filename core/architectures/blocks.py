"""Weights of the parts that decoders share: what `bien.core.models` has a layer for, by the same names."""

from __future__ import annotations

import msgspec

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


def experts(
    prefix: str,
    width: int,
    inner: int,
    count: int,
    used: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Weight]:
    """`count` gated experts, of which a token uses `used`. `prefix`: "model.layers.0.mlp.experts."; `names`:
    of gate, up and down projections."""
    shapes = dict(zip(names, ((inner, width), (inner, width), (width, inner)), strict=True))
    return [Weight(f"{prefix}{{}}.{n}.weight", s, "routed", count, used) for n, s in shapes.items()]


def sigmoid_mixture(
    prefix: str,
    hidden: int,
    inner: int,
    count: int,
    used: int,
    shared: int,
    routed: list[Weight] | None = None,
) -> list[Weight]:
    """DeepSeek-V3's mixture: a router with a balancing bias, `count` experts, `shared` more that every token
    uses as one layer of their width. `prefix`: "model.layers.0.mlp."; `routed`: in place of the usual
    experts."""
    weights = linear(f"{prefix}gate", count, hidden, "router")
    weights.append(Weight(f"{prefix}gate.e_score_correction_bias", (count,), "router", product=False))
    weights += routed or experts(f"{prefix}experts.", hidden, inner, count, used)
    if shared:
        weights += gated(f"{prefix}shared_experts.", hidden, inner * shared, "shared")
    return weights


def layer_norms(prefix: str, hidden: int) -> list[Weight]:
    """The norms before attention and before the feed-forward layer. `prefix`: "model.layers.0."."""
    return [norm(f"{prefix}input_layernorm", hidden), norm(f"{prefix}post_attention_layernorm", hidden)]


def latent(
    prefix: str,
    hidden: int,
    heads: int,
    *,
    q_rank: int | None,
    rank: int,
    nope: int,
    rope: int,
    value: int,
    bias: bool = False,
) -> list[Weight]:
    """Multi-head latent attention. `prefix`: "model.layers.0.self_attn."; `q_rank` None: queries straight
    from the hidden state; `rank` + `rope`: width of a cached entry."""
    if q_rank is None:
        queries = linear(f"{prefix}q_proj", heads * (nope + rope), hidden, "attention")
    else:
        queries = [
            *linear(f"{prefix}q_a_proj", q_rank, hidden, "attention", bias=bias),
            norm(f"{prefix}q_a_layernorm", q_rank),
            *linear(f"{prefix}q_b_proj", heads * (nope + rope), q_rank, "attention"),
        ]
    return [
        *queries,
        *linear(f"{prefix}kv_a_proj_with_mqa", rank + rope, hidden, "attention", bias=bias),
        norm(f"{prefix}kv_a_layernorm", rank),
        *linear(f"{prefix}kv_b_proj", heads * (nope + value), rank, "attention"),
        *linear(f"{prefix}o_proj", hidden, heads * value, "attention", bias=bias),
    ]


def indexer(prefix: str, hidden: int, q_rank: int, heads: int, d: int) -> list[Weight]:
    """DeepSeek sparse attention's indexer. `prefix`: "model.layers.0.self_attn.indexer."."""
    return [
        *linear(f"{prefix}wq_b", heads * d, q_rank, "indexer"),
        *linear(f"{prefix}wk", d, hidden, "indexer"),
        norm(f"{prefix}k_norm", d),
        Weight(f"{prefix}k_norm.bias", (d,), "norm", product=False),
        *linear(f"{prefix}weights_proj", heads, hidden, "indexer"),
    ]


def predicting_layer(prefix: str, vocab: int, hidden: int, layer: list[Weight]) -> list[Weight]:
    """A layer for further tokens and what surrounds it; embedding and head are the model's, copied by some.
    `prefix`: "model.layers.92.", `layer`: the tensors of a layer as the model's own have them."""
    table = (vocab, hidden)
    around = [
        *(norm(f"{prefix}{n}", hidden) for n in ("enorm", "hnorm", "shared_head.norm")),
        *linear(f"{prefix}eh_proj", hidden, 2 * hidden, "mtp"),
        Weight(f"{prefix}embed_tokens.weight", table, "mtp", product=False, spare=True),
        Weight(f"{prefix}shared_head.head.weight", table, "mtp", spare=True),
    ]
    return [msgspec.structs.replace(w, role="mtp") for w in (*around, *layer)]
