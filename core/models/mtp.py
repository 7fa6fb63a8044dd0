"""`MultiTokenPrediction`: a layer behind the model's last one, which predicts the token after the next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.architectures.weights import predicting
from bien.core.errors import ModelError
from bien.core.models.decoder import Decoder

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class MultiTokenPrediction:
    """DeepSeek-AI, "DeepSeek-V3" (2024), section 2.2. From the state that predicts the token at p + 1, and
    that token, the state that predicts the one at p + 2:

        state'(p) = shared_head.norm(layer(eh_proj [enorm(embedding of token p + 1), hnorm(state(p))]))

    Embedding and output head are the target's. State' is to the next depth, or to the same one at the next
    position, what state is to this one.
    """

    def __init__(
        self, index: int, target: Decoder, a: Architecture, source: Checkpoint, parts: ModelParts
    ) -> None:
        """`index`: of the layer, from `a.layers` on."""
        prefix = f"model.layers.{index}."
        self._target, self._rms_norm = target, parts.kernels.rms_norm
        self.eps = float(a.config["rms_norm_eps"])
        self.token_norm = source.take(prefix + "enorm.weight")
        self.state_norm = source.take(prefix + "hnorm.weight")
        self.merge = parts.quantizer.linear(prefix + "eh_proj", source.take(prefix + "eh_proj.weight"), None)
        self.layer = target.make_layer(index, a, source, parts)
        self.norm = source.take(prefix + "shared_head.norm.weight")

    def first_state(self, hidden: Tensor) -> Tensor:
        """The target's state: its hidden states [N, H] behind the last layer, normed."""
        return self._rms_norm(hidden, self._target.norm, self._target.eps)

    def __call__(self, state: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """States [N, H] of the rows' positions, the token behind each [N] int64 -> states' [N, H]. Writes the
        layer's entries at the rows' positions, in the groups that `rows` has for it (`Rows.redirect`)."""
        return self._rms_norm(self.layer(self._entered(state, tokens), rows), self.norm, self.eps)

    def fill(self, state: Tensor, tokens: Tensor, rows: Rows) -> None:
        """Writes the layer's entries, and computes nothing else: what the call needs of positions before."""
        self.layer.fill(self._entered(state, tokens), rows)

    def _entered(self, state: Tensor, tokens: Tensor) -> Tensor:
        words = self._rms_norm(self._target.embed(tokens), self.token_norm, self.eps)
        both = torch.cat([words, self._rms_norm(state, self.state_norm, self.eps)], -1)
        return self.merge(both)

    def head(self, state: Tensor) -> Tensor:
        """States' [R, H] -> logits [R, vocabulary]."""
        return self._target.collect(self._target.output(state), "logits")


def load_predicting(
    a: Architecture, folder: Path, target: Decoder, parts: ModelParts
) -> list[MultiTokenPrediction]:
    """The layers for further tokens that the folder of `target`'s model has, by depth. ModelError where there
    are none, or not all of their tensors."""
    from bien.core.models.loading import Checkpoint

    with Checkpoint.open(folder, parts.dtype, parts.device, a.config) as checkpoint:
        needed = predicting(a.weights, checkpoint)
        if not needed:
            raise ModelError(f"model folder {folder} has no layers that predict further tokens")
        lost = [name for name in needed if name not in checkpoint]
        if lost:
            raise ModelError(f"model folder {folder}: missing: {', '.join(lost[:8])}")
        depths = sorted({int(name.split(".")[2]) for name in needed})
        return [MultiTokenPrediction(i, target, a, checkpoint, parts) for i in depths]
