"""`Form`: what a folder with an EAGLE-3 drafter holds, whoever has written it. No torch.

Three makers, told apart by config.json:

    safeailab    architectures ["LlamaForCausalLM"], draft_vocab_size; layer under "midlayer."
    specforge    architectures ["LlamaForCausalLMEagle3"]; the same names; perhaps `eagle_config`
    speculators  speculators_model_type "eagle3", transformer_layer_config; layer under "layers.0."

They number the target's states differently: `eagle_aux_hidden_state_layer_ids` of `speculators` (and the
default of all, 2, L // 2, L - 3) counts states that *enter* a layer, that in SpecForge's `eagle_config`
states that *leave* one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from bien.core.api import Architecture, DeploymentError, ModelError, nearest
from bien.plugins.speculators._fields import Fields, read_fields
from bien.plugins.speculators._folder import (
    LayerShape,
    Shapes,
    attention_shapes,
    check_full_attention,
    layer_shape,
    mlp_shapes,
    norm_shapes,
)

Tap = tuple[int, Literal["in", "out"]]
KIND = "eagle3"
EXPECTED = (
    "expected an EAGLE-3 drafter: of SafeAILab (architectures ['LlamaForCausalLM'] and draft_vocab_size), of "
    "SpecForge (['LlamaForCausalLMEagle3']), or of speculators (speculators_model_type 'eagle3')"
)
SPECFORGE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """`taps`: of the target, which the drafter reads; None: the usual ones."""

    folder: str
    maker: Literal["safeailab", "specforge", "speculators"]
    prefix: str  # of the layer's tensors
    layer: LayerShape
    vocab: int  # the target's
    draft_vocab: int
    target_hidden: int
    taps: tuple[Tap, ...] | None
    fc_norm: bool = False  # every tapped state is normed by itself
    norm_before_fc: bool = False  # all of them are as one
    norm_before_residual: bool = False  # the residual is the normed state
    norm_output: bool = False  # the next step is given the normed state

    def taps_of(self, layers: int) -> tuple[Tap, ...]:
        """Of a target of so many layers."""
        return self.taps or ((2, "in"), (layers // 2, "in"), (layers - 3, "in"))

    @property
    def states(self) -> int:
        """How many states are fused."""
        return len(self.taps or (0, 0, 0))

    def check(self, a: Architecture) -> None:
        """DeploymentError unless the drafter was made for a target like this one."""
        problem = ""
        if a.hidden_size != self.target_hidden:
            problem = f"hidden states of {self.target_hidden} features, but the target has {a.hidden_size}"
        elif a.vocab_size != self.vocab:
            problem = f"a vocabulary of {self.vocab} tokens, but the target has {a.vocab_size}"
        else:
            outside = [i for i, _ in self.taps_of(a.layers) if not 0 <= i < a.layers]
            if outside:
                problem = f"states at layer {outside[0]}, but the target has layers 0 to {a.layers - 1}"
        if problem:
            raise DeploymentError(
                f"eagle3: {self.folder} is made for {problem} ({a.model!r}); give the drafter of this model",
                field="path",
            )

    def tensors(self) -> tuple[Shapes, Shapes]:
        """(needed, spare)."""
        a, hidden = self.layer, self.layer.hidden
        states = self.states
        norms = [self.prefix + n for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        needed: Shapes = {
            "fc.weight": (hidden, states * self.target_hidden),
            **norm_shapes(hidden, *norms, "norm"),
            **attention_shapes(f"{self.prefix}self_attn.", a, 2 * hidden),
            **mlp_shapes(f"{self.prefix}mlp.", a),
            "lm_head.weight": (self.draft_vocab, hidden),
        }
        if self.fc_norm:
            needed |= norm_shapes(self.target_hidden, *(f"fc_norm.{i}" for i in range(states)))
        if self.norm_before_fc:
            needed |= norm_shapes(states * self.target_hidden, "input_norm")
        spare: Shapes = {"t2d": (self.vocab,), "d2t": (self.draft_vocab,)}
        words: Shapes = {"embed_tokens.weight": (self.vocab, hidden)}
        if self.draft_vocab != self.vocab:
            needed["d2t"] = spare.pop("d2t")
        if hidden == self.target_hidden:
            spare |= words  # a copy of the target's, or trained on
        else:
            needed |= words
        return needed, spare


def read_form(folder: Path) -> Form:
    """ModelError for what is no EAGLE-3 drafter, or one that is not served; it says what was expected."""
    fields = read_fields(folder, KIND)
    path, made_of = fields.path, fields.find("architectures")
    kind = fields.find("speculators_model_type")
    layer = fields
    maker: Literal["safeailab", "specforge", "speculators"]
    if kind is not None:
        maker = "speculators"
        if kind != "eagle3":
            raise ModelError(f"eagle3: {path} has speculators_model_type = {kind!r}; {EXPECTED}")
        layer = fields.within(fields.object("transformer_layer_config"))
        if not any(layer.places):
            raise ModelError(f"eagle3: {path} lacks transformer_layer_config; {EXPECTED}")
    elif isinstance(made_of, list) and any(name in SPECFORGE for name in made_of):
        maker = "specforge"
    elif made_of == ["LlamaForCausalLM"] and fields.find("draft_vocab_size") is not None:
        maker = "safeailab"
    else:
        raise ModelError(
            f"eagle3: {path} has architectures = {made_of!r}, draft_vocab_size = "
            f"{fields.find('draft_vocab_size')!r}; {EXPECTED}"
        )
    return _form(folder, maker, fields, layer)


def _form(
    folder: Path, maker: Literal["safeailab", "specforge", "speculators"], fields: Fields, layer: Fields
) -> Form:
    path = fields.path
    types = ("llama", "qwen3") if maker == "speculators" else ("llama",)
    if (made := layer.find("model_type")) is not None and made not in types:
        raise ModelError(f"eagle3: {path} has model_type = {made!r}; {nearest(str(made), types)}")
    if (layers := layer.whole("num_hidden_layers", 1)) != 1:
        raise ModelError(f"eagle3: {path} has {layers} layers; valid: 1")
    check_full_attention(layer)
    if fields.find("parallel_drafting") or fields.find("mask_hidden") is not None:
        raise ModelError(
            f"eagle3: {path} is of a parallel drafter (P-EAGLE), which is not served; {EXPECTED}"
        )
    if maker == "speculators" and fields.find("norm_before_residual") is None:
        raise ModelError(
            f"eagle3: {path} does not say norm_before_residual (true or false), and readers of this format "
            "do not agree on what that means"
        )
    shape = layer_shape(layer)
    vocab = layer.whole("vocab_size")
    return Form(
        folder=str(folder),
        maker=maker,
        prefix="layers.0." if maker == "speculators" else "midlayer.",
        layer=shape,
        vocab=vocab,
        draft_vocab=fields.whole("draft_vocab_size", vocab, most=vocab),
        target_hidden=fields.whole("target_hidden_size", shape.hidden),
        taps=_taps(fields),
        **{flag: fields.flag(flag, False) for flag in FLAGS},
    )


def _taps(fields: Fields) -> tuple[Tap, ...] | None:
    name = "eagle_aux_hidden_state_layer_ids"
    nested = fields.within(fields.object("eagle_config"))
    if not nested.flag("use_aux_hidden_state", True):
        raise ModelError(
            f"eagle3: {fields.path} has use_aux_hidden_state = false, as EAGLE 1 and 2; {EXPECTED}"
        )
    side: Literal["in", "out"] = "in"
    given = fields.numbers(name, "aux_hidden_state_layer_ids")
    if given is None:
        given, side = nested.numbers(name), "out"
    return None if given is None else tuple((i, side) for i in given)
