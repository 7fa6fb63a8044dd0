"""`Form`: what a folder with one layer for further tokens holds, apart from the target. No torch.

Of `speculators` (speculators_model_type "mtp"), or with the names of Qwen's models ("mtp.fc"). Embedding and
output head are the target's.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from bien.core.api import Architecture, DeploymentError, ModelError
from bien.plugins.speculators._fields import read_fields
from bien.plugins.speculators._folder import (
    LayerShape,
    Shapes,
    attention_shapes,
    check_full_attention,
    layer_shape,
    mlp_shapes,
    norm_shapes,
)

KIND = "mtp"
EXPECTED = (
    "expected a folder of speculators (speculators_model_type 'mtp', transformer_layer_config of model_type "
    "'qwen3' or 'llama'), or one with Qwen's names ('mtp.fc', 'mtp.layers.0.', model_type 'qwen3')"
)
TYPES = ("qwen3", "llama")


class Names(msgspec.Struct, frozen=True):
    """Of the tensors around a layer, and before those of the layer."""

    layer: str
    merge: str
    token_norm: str
    state_norm: str
    final_norm: str


SPECULATORS = Names(
    "mtp_layers.0.",
    "mtp_layers.0.input_proj",
    "mtp_layers.0.token_layernorm",
    "mtp_layers.0.hidden_layernorm",
    "mtp_layers.0.final_layernorm",
)
QWEN = Names("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


class Form(msgspec.Struct, frozen=True):
    folder: str
    names: Names
    layer: LayerShape
    vocab: int

    def check(self, a: Architecture) -> None:
        """DeploymentError unless the layer was made for a target like this one."""
        if (a.hidden_size, a.vocab_size) != (self.layer.hidden, self.vocab):
            raise DeploymentError(
                f"mtp: {self.folder} is made for hidden states of {self.layer.hidden} features and "
                f"{self.vocab} tokens, but the target ({a.model!r}) has {a.hidden_size} and {a.vocab_size}; "
                "give that of this model",
                field="path",
            )

    def tensors(self) -> tuple[Shapes, Shapes]:
        """(needed, spare)."""
        n, a = self.names, self.layer
        norms = [n.layer + "input_layernorm", n.layer + "post_attention_layernorm"]
        needed: Shapes = {
            f"{n.merge}.weight": (a.hidden, 2 * a.hidden),
            **norm_shapes(a.hidden, n.token_norm, n.state_norm, n.final_norm, *norms),
            **attention_shapes(f"{n.layer}self_attn.", a),
            **mlp_shapes(f"{n.layer}mlp.", a),
        }
        # Copies of the target's, which some exports carry.
        table = (self.vocab, a.hidden)
        return needed, {"embed_tokens.weight": table, "lm_head.weight": table}


def read_form(folder: Path) -> Form:
    """ModelError for what is no such folder, or a layer that is not served; it says what was expected."""
    fields = read_fields(folder, KIND)
    path, kind = fields.path, fields.find("speculators_model_type")
    layer = fields if kind is None else fields.within(fields.object("transformer_layer_config"))
    if kind not in (None, "mtp") or not any(layer.places):
        raise ModelError(f"mtp: {path} has speculators_model_type = {kind!r}; {EXPECTED}")
    if (made := layer.find("model_type")) not in (TYPES if kind else ("qwen3",)):
        raise ModelError(f"mtp: {path} has model_type = {made!r}; {EXPECTED}")
    check_full_attention(layer)
    return Form(
        str(folder),
        QWEN if kind is None else SPECULATORS,
        layer_shape(layer),
        layer.whole("vocab_size"),
    )
