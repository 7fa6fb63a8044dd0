"""`Module`: a layer for further tokens from a folder of its own. Needs torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import DrafterParts, Rows, TargetHandle
from bien.plugins.speculators._network import Attention, Mlp, load_tensors
from bien.plugins.speculators.mtp.form import KIND, Form


class Module:
    """What the core's `MultiTokenPrediction` is to layers in the target's folder; layer 0 of its group."""

    def __init__(self, form: Form, target: TargetHandle, parts: DrafterParts) -> None:
        needed, spare = form.tensors()
        tensors = load_tensors(Path(form.folder), needed, spare, parts, KIND)
        self._target, self._kernels, self._eps = target, parts.kernels, form.layer.eps
        n = form.names
        self._merge = tensors[f"{n.merge}.weight"]
        self._token_norm, self._state_norm = (
            tensors[f"{n.token_norm}.weight"],
            tensors[f"{n.state_norm}.weight"],
        )
        self._final_norm = tensors[f"{n.final_norm}.weight"]
        self._input_norm = tensors[f"{n.layer}input_layernorm.weight"]
        self._post_norm = tensors[f"{n.layer}post_attention_layernorm.weight"]
        self._attention = Attention(tensors, f"{n.layer}self_attn.", form.layer, parts)
        self._mlp = Mlp(tensors, f"{n.layer}mlp.", parts)

    def first_state(self, hidden: Tensor) -> Tensor:
        """The target's state: its hidden states [N, hidden] behind the last layer, normed."""
        return self._target.normed(hidden)

    def __call__(self, state: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """The states before the rows [N, hidden], their tokens [N] int64 -> the rows' states, normed. Writes
        the rows' entries."""
        entered, normed, angles = self._entered(state, tokens, rows)
        query, entry = self._attention.project(normed, angles)
        rows.write(0, entry)
        mixed = rows.attend(0, query, self._attention.scale)
        hidden, normed = self._kernels.add_rms_norm(
            entered, self._attention.out(mixed), self._post_norm, self._eps
        )
        return self._rms(hidden + self._mlp(normed), self._final_norm)

    def fill(self, state: Tensor, tokens: Tensor, rows: Rows) -> None:
        """Writes the rows' entries, and computes nothing else."""
        _, normed, angles = self._entered(state, tokens, rows)
        rows.write(0, self._attention.entries(normed, angles))

    def head(self, state: Tensor) -> Tensor:
        """[R, hidden] -> logits [R, vocabulary]."""
        return self._target.project(state)

    def _entered(self, state: Tensor, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        words = self._rms(self._target.embed(tokens), self._token_norm)
        x = F.linear(torch.cat([words, self._rms(state, self._state_norm)], -1), self._merge)
        return x, self._rms(x, self._input_norm), self._attention.angles(rows.positions, x.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._eps)
