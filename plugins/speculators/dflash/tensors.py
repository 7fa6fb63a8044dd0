"""What a block drafter needs: tensors of its folder, states of the target, room for its context. No torch."""

from __future__ import annotations

from typing import Literal

from bien.core.api import ITEM_BYTES, Architecture, DeploymentError, GroupKind, KVGroup
from bien.plugins.speculators._folder import Shapes, attention_shapes, mlp_shapes, norm_shapes
from bien.plugins.speculators.dflash.form import BlockForm, check_last

COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the target's, that some formats carry


def needed(form: BlockForm) -> Shapes:
    """Tensors that must be there."""
    a = form.layer
    shapes: Shapes = {"fc.weight": (a.hidden, len(form.taps) * a.hidden)}
    shapes |= norm_shapes(a.hidden, "hidden_norm", "norm")
    for i in range(form.layers):
        prefix = f"layers.{i}."
        shapes |= norm_shapes(a.hidden, f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm")
        shapes |= attention_shapes(f"{prefix}self_attn.", a) | mlp_shapes(f"{prefix}mlp.", a)
        for name in ("attention_conv", "mlp_conv") if form.conv_taps else ():
            kernels = 2 * form.conv_taps * (a.hidden // form.conv_group)
            shapes[f"{prefix}{name}.base_kernel"] = (2, form.conv_taps, a.hidden)
            shapes[f"{prefix}{name}.kernel_projection.weight"] = (kernels, a.hidden)
    if form.selector_rank:
        prefix, rank = "candidate_selector.", form.selector_rank
        shapes |= {f"{prefix}{n}_codebook": (form.vocab, rank) for n in ("predecessor", "successor")}
        shapes[f"{prefix}hidden_projection.weight"] = (rank, a.hidden)
    if form.markov_rank:
        shapes |= _markov(form)
    if form.confidence:
        width = a.hidden + (form.markov_rank if form.confidence_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if form.draft_vocab:
        shapes |= {"lm_head.weight": (form.draft_vocab, a.hidden), "d2t": (form.draft_vocab,)}
    return shapes


def spare(form: BlockForm) -> Shapes:
    """Tensors that may be there."""
    shapes: Shapes = {"embed_tokens.weight": (form.vocab, form.layer.hidden), "t2d": (form.vocab,)}
    if not form.draft_vocab:
        shapes |= {"lm_head.weight": (form.vocab, form.layer.hidden), "d2t": (form.vocab,)}
    return shapes


def _markov(form: BlockForm) -> Shapes:
    rank, hidden, prefix = form.markov_rank, form.layer.hidden, "markov_head."
    shapes: Shapes = {
        f"{prefix}markov_w1.weight": (form.vocab, rank),
        f"{prefix}markov_w2.weight": (form.draft_vocab or form.vocab, rank),
    }
    sizes = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
    if form.markov in sizes:
        name, out, inputs = sizes[form.markov]
        shapes |= {f"{prefix}{name}.weight": (out, inputs), f"{prefix}{name}.bias": (out,)}
    return shapes


def taps(form: BlockForm) -> tuple[tuple[int, Literal["in", "out"]], ...]:
    """The target's states that are read: what leaves a layer; of the embedding, what enters the first."""
    return tuple((0, "in") if i < 0 else (i, "out") for i in form.taps)


def seen(own: int, given: int) -> int:
    """Context positions that a layer sees: its own window and the one that parameters give; 0 = all."""
    return min(own, given) if own and given else own or given


def draft_groups(
    kind: str, form: BlockForm, a: Architecture, block_tokens: int, window: int
) -> tuple[KVGroup, ...]:
    """A DRAFT group per window of the draft layers, the smallest first. DeploymentError for a target that
    the drafter was not made for."""
    where = f"{kind}: {form.folder}"
    for name, own, theirs in (
        ("hidden_size", form.layer.hidden, a.hidden_size),
        ("vocab_size", form.vocab, a.vocab_size),
        ("num_target_layers", form.target_layers or a.layers, a.layers),
    ):
        if own != theirs:
            raise DeploymentError(
                f"{where} was made for another model: its {name} is {own}, that of {a.model!r} is {theirs}",
                field="path",
            )
    check_last(where, form.taps, a.layers)
    windows = [seen(w, window) for w in form.windows]
    dtype, each = a.groups[0].dtype, form.layer.entry
    groups = []
    for size in sorted(set(windows)):
        layers = tuple(i for i, w in enumerate(windows) if w == size)
        groups.append(
            KVGroup(
                f"draft-{size}" if size else "draft",
                GroupKind.DRAFT,
                layers,
                block_tokens,
                bytes_per_token=len(layers) * each * ITEM_BYTES[dtype],
                window=size,
                dtype=dtype,
                shardable=False,
            )
        )
    return tuple(groups)
