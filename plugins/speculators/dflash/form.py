"""`BlockForm`: what the config.json of a block drafter says, in any of its formats. No torch.

Formats: z-lab and SpecForge (`dflash_config`), DeepSpec (fields at the top level of a copy of the target's
config), speculators (`speculators_model_type`, `transformer_layer_config`). A field is looked for in
`dflash_config`, then `eagle_config`, then at the top level.

Target layers are numbered by their *outputs*: -1 is the embedding. Speculators' `aux_hidden_state_layer_ids`
count the states before layers, which is one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bien.core.api import ModelError, nearest
from bien.plugins.speculators._fields import Fields, read_fields
from bien.plugins.speculators._folder import LayerShape, layer_shape

DFLASH, DSPARK = "dflash", "dspark"
# Architectures of z-lab, SpecForge and DeepSpec; values of speculators_model_type.
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel")
KINDS = ("dflash", "dflash2", "dspark")
MARKOV = ("vanilla", "gated", "rnn")
# What may stand in `dflash_config`: what is read, and what is of training.
KNOWN = {"block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "draft_vocab_size"}
KNOWN |= {"sample_from_anchor", "causal", "is_causal", "projector_type", "attention_mode", "shift_label"}
KNOWN |= {"attention_sink_bias", "use_aux_hidden_state", "input_embedding_scale", "output_multiplier"}
KNOWN |= {"final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
KNOWN |= {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
KNOWN |= {"num_anchors", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma"}


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Shapes and rules of a block drafter."""

    folder: Path
    layer: LayerShape
    windows: tuple[int, ...]  # per layer: context positions that are seen, 0 = all
    causal: tuple[bool, ...]  # per layer: whether a slot sees no later slot of its block
    vocab: int  # of the target
    draft_vocab: int  # of the drafter's own output head; 0 = the target's
    taps: tuple[int, ...]  # target layers whose outputs are read, -1 = embedding
    target_layers: int  # 0 = not said
    block: int  # slots: the last token, then masks
    mask: int
    from_anchor: bool  # slot 0 predicts a token too
    embed_scale: float
    logit_scale: float
    soft_cap: float  # 0 = none
    conv_taps: int  # DFlash 2: of the convolutions around sublayers, 0 = none
    conv_group: int
    selector_rank: int  # DFlash 2, 0 = none
    selector_top_k: int
    markov_rank: int  # DSpark, 0 = none
    markov: str
    confidence: bool
    confidence_markov: bool  # the confidence head sees the token before

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def drafts(self) -> int:
        """Tokens that a block predicts."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def kind(self) -> str:
        return DSPARK if self.markov_rank or self.confidence else DFLASH


def read_form(folder: Path, kind: str) -> BlockForm:
    """`kind`: the speculator that asks, for messages. ModelError names the folder, the field and what is
    valid."""
    return _Reader(folder, f"{kind}: {folder}", read_fields(folder, kind)).form()


class _Reader:
    # Looks fields up, with complaints that name the folder.
    def __init__(self, folder: Path, where: str, config: Fields) -> None:
        self.folder, self.where = folder, where
        self.architecture = (config.names("architectures") or [""])[0]
        self.library = config.find("speculators_model_type")
        if self.library is None and self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{where}: config.json is of architecture {self.architecture!r}, which is no block drafter; "
                + nearest(self.architecture, ARCHITECTURES)
            )
        if self.library is not None and self.library not in KINDS:
            raise ModelError(
                f"{where}: speculators_model_type = {self.library!r} is no block drafter; "
                + nearest(str(self.library), KINDS)
            )
        own = config.object("dflash_config")
        unread = sorted(set(own) - KNOWN)
        if unread:
            raise ModelError(f"{where}: dflash_config has fields that are not known: {', '.join(unread)}")
        self.own = config.within(own, config.object("eagle_config"), *config.places)
        # Shapes of the draft layers.
        self.layer = config.within(config.object("transformer_layer_config")) if self.library else config

    def form(self) -> BlockForm:
        deepspec = self.architecture == "Qwen3DSparkModel" and self.library is None
        self._refuse("projector_type", (None, "dflash", "dspark"))
        self._refuse("attention_mode", (None, "gqa", "mha"))
        self._refuse("attention_sink_bias", (None, False))
        self._refuse("shift_label", (None, False))
        self._refuse("use_aux_hidden_state", (None, True))
        if self.library:
            spark = self.library == "dspark"
        else:
            spark = self.architecture in ("DSparkDraftModel", "Qwen3DSparkModel")
            spark = spark or self.own.find("projector_type") == "dspark"
        second = self.library == "dflash2" or self.architecture == "DFlash2DraftModel"
        # What a runner that looks at the name alone would leave out.
        second = second or any(self.own.find(n) for n in ("conv_kernel_size", "selector_rank"))
        # Queries and keys are normed, whatever the target's kind.
        layer = msgspec.structs.replace(layer_shape(self.layer), qk_norm=True)
        windows = self._windows()
        vocab = self.layer.whole("vocab_size")
        draft = self.own.whole("draft_vocab_size", vocab, least=0, most=vocab)
        rank = self.own.whole("markov_rank", 0, least=0, most=1 << 16) if spark else 0
        confidence = spark and self.own.flag("enable_confidence_head", False)
        target = self._target_layers()
        form = BlockForm(
            folder=self.folder,
            layer=layer,
            windows=windows,
            causal=self._causal(windows, deepspec),
            vocab=vocab,
            draft_vocab=0 if draft == vocab else draft,
            taps=self._taps(target, len(windows)),
            target_layers=target,
            block=self.own.whole("block_size", most=1 << 10),
            mask=self._mask(vocab),
            from_anchor=self.own.flag("sample_from_anchor", spark),
            embed_scale=self.own.number("input_embedding_scale", 1.0),
            logit_scale=self.own.number("output_multiplier", 1.0),
            soft_cap=self.own.number("final_logit_softcapping", 0.0),
            conv_taps=self.own.whole("conv_kernel_size", most=64) if second else 0,
            conv_group=self.own.whole("conv_group_size", most=layer.hidden) if second else 0,
            selector_rank=self.own.whole("selector_rank", most=1 << 16) if second else 0,
            selector_top_k=self.own.whole("selector_top_k", most=vocab) if second else 0,
            markov_rank=rank,
            markov=self._head() if rank else "",
            confidence=confidence,
            confidence_markov=confidence and self.own.flag("confidence_head_with_markov", False),
        )
        self._check(form)
        return form

    def _check(self, form: BlockForm) -> None:
        if form.drafts < 1:
            raise ModelError(
                f"{self.where}: block_size = {form.block} leaves no token to draft; needs 2 or more"
            )
        if form.conv_group and form.layer.hidden % form.conv_group:
            raise ModelError(
                f"{self.where}: conv_group_size = {form.conv_group} does not divide "
                f"hidden_size = {form.layer.hidden}"
            )
        if form.confidence_markov and not form.markov_rank:
            raise ModelError(f"{self.where}: confidence_head_with_markov needs markov_rank above 0")
        if form.selector_rank and form.draft_vocab:
            raise ModelError(f"{self.where}: a candidate selector needs the target's whole vocabulary")

    def _refuse(self, name: str, valid: tuple[Any, ...]) -> None:
        if (value := self.own.find(name)) not in valid:
            listed = ", ".join(repr(v) for v in valid if v is not None)
            raise ModelError(f"{self.where}: {name} = {value!r} is not supported; valid: {listed}")

    def _head(self) -> str:
        kind = self.own.find("markov_head_type") or "vanilla"
        if kind not in MARKOV:
            raise ModelError(f"{self.where}: markov_head_type = {kind!r}; {nearest(str(kind), MARKOV)}")
        return str(kind)

    def _mask(self, vocab: int) -> int:
        value = self.own.find("mask_token_id")
        if type(value) is not int or not 0 <= value < vocab:
            raise self.own.wrong("mask_token_id", value, f"a token id below {vocab}")
        return value

    def _target_layers(self) -> int:
        return self.own.whole("num_target_layers", 0, most=10_000)

    def _taps(self, target: int, layers: int) -> tuple[int, ...]:
        ids, less = self.own.numbers("target_layer_ids"), 0
        if ids is None and self.library:
            name = "aux_hidden_state_layer_ids"
            ids, less = self.own.numbers(name, f"eagle_{name}"), 1
        if ids is None and target:
            # The default of z-lab: evenly from layer 1 to the third from the end.
            last = target - 3
            ids = (
                [target // 2]
                if layers == 1
                else [round(1 + i * (last - 1) / (layers - 1)) for i in range(layers)]
            )
        if ids is None:
            raise self.own.wrong("target_layer_ids", None, "a list of layers, as whole numbers")
        taps = tuple(i - less for i in ids)
        if min(taps) < -1 or len(set(taps)) < len(taps):
            raise ModelError(
                f"{self.where}: target layers {ids}; needs different ones from {less - 1} (the embedding) on"
            )
        if target:
            check_last(self.where, taps, target)
        return taps

    def _windows(self) -> tuple[int, ...]:
        layers = self.layer.whole("num_hidden_layers", most=1000)
        kinds = self.layer.names("layer_types")
        if kinds is None:
            sliding = self.layer.flag("use_sliding_window", False)
            since = self.layer.whole("max_window_layers", 0, least=0) if sliding else layers
            kinds = ["sliding_attention" if i >= since else "full_attention" for i in range(layers)]
        if len(kinds) != layers or any(k not in ("full_attention", "sliding_attention") for k in kinds):
            raise ModelError(
                f"{self.where}: layer_types = {kinds}; needs {layers} of 'full_attention' and "
                "'sliding_attention'"
            )
        if "sliding_attention" not in kinds:
            return (0,) * layers
        window = self.layer.whole("sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def _causal(self, windows: tuple[int, ...], deepspec: bool) -> tuple[bool, ...]:
        for name in ("causal", "is_causal"):
            if self.own.find(name) is not None:
                return (self.own.flag(name, False),) * len(windows)
        if deepspec or (self.library and self.own.flag("sliding_window_non_causal", False)):
            return (False,) * len(windows)
        return tuple(window > 0 for window in windows)


def check_last(where: str, taps: tuple[int, ...], layers: int) -> None:
    """ModelError for target layers that a model of so many layers does not have, or that is its last: what
    the drafter was trained on is then the normed state, which no layer puts out."""
    if max(taps) > layers - 2:
        raise ModelError(
            f"{where}: reads the output of target layer {max(taps)}; of {layers} layers valid: -1 (the "
            f"embedding) to {layers - 2} (the last one is not read)"
        )
