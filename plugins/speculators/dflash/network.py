"""The network of block drafters: DFlash (arXiv 2602.06036), with DFlash 2's convolutions where it has them.

What the target's layers put out, projected and normed, is the *context*: every draft layer has its own keys
and values of it, which `fill` stores once per confirmed position. A block of slots (the last token, then
masks) passes the layers in one go: each slot sees the context before the block, and the other slots, whose
keys and values are stored nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import DrafterParts
from bien.plugins.speculators._network import Attention, Mlp
from bien.plugins.speculators.dflash.form import BlockForm


class Convolution:
    """Around a sublayer: each slot is mixed with those before it in its block, before and after, by kernels
    that are part learned (per feature), part computed from the slot (per group of features)."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, form: BlockForm) -> None:
        self._group, self._taps = form.conv_group, form.conv_taps
        self._base = tensors[f"{prefix}base_kernel"]  # [before and after, taps, H]
        self._projection = tensors[f"{prefix}kernel_projection.weight"]

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [S, B, H] that enters the sublayer -> (mixed, the kernels for `after`)."""
        kernels = F.linear(x, self._projection).view(*x.shape[:2], 2, self._taps, -1)
        return self._mixed(x, kernels[:, :, 0], self._base[0]), kernels[:, :, 1]

    def after(self, x: Tensor, kernels: Tensor) -> Tensor:
        """x [S, B, H] that leaves it."""
        return self._mixed(x, kernels, self._base[1])

    def _mixed(self, x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for tap in range(min(self._taps, x.shape[1])):
            kernel = base[tap] + kernels[:, tap:, tap].repeat_interleave(self._group, -1)
            out[:, tap:] += kernel * x[:, : x.shape[1] - tap]
        return out


class BlockLayer:
    """One draft layer."""

    def __init__(
        self, index: int, form: BlockForm, tensors: Mapping[str, Tensor], group: int, parts: DrafterParts
    ) -> None:
        """`group`: plan index of the KV group that has this layer's context."""
        prefix = f"layers.{index}."
        self.index, self.group, self.causal = index, group, form.causal[index]
        self._norm, self._eps = parts.kernels.rms_norm, form.layer.eps
        self._input_norm = tensors[f"{prefix}input_layernorm.weight"]
        self._post_norm = tensors[f"{prefix}post_attention_layernorm.weight"]
        self.attention = Attention(tensors, f"{prefix}self_attn.", form.layer, parts)
        self._mlp = Mlp(tensors, f"{prefix}mlp.", parts)
        self._convolutions: list[Convolution] = []
        if form.conv_taps:
            names = ("attention_conv.", "mlp_conv.")
            self._convolutions = [Convolution(tensors, prefix + name, form) for name in names]

    def fill(self, context: Tensor, rows: Any, angles: Tensor) -> None:
        """Store keys and values of the rows' context [N, H]."""
        rows.redirect(self.group).write(self.index, self.attention.entries(context, angles))

    def __call__(self, x: Tensor, rows: Any, positions: Tensor, angles: Tensor) -> Tensor:
        """x [S, B, H] of the blocks behind the context before `rows`; positions [S, B]."""

        def attend(normed: Tensor) -> Tensor:
            sequences, block = positions.shape
            query, entries = self.attention.project(normed.flatten(0, 1), angles)
            mask = None
            if self.causal:
                mask = torch.ones(1, block, block, dtype=torch.bool, device=x.device).tril()
            mixed = rows.redirect(self.group).attend_block(
                self.index,
                query.view(sequences, block, *query.shape[1:]),
                entries.view(sequences, block, -1),
                self.attention.scale,
                mask,
                positions,
            )
            return self.attention.out(mixed)

        sublayers: list[tuple[Tensor, Callable[[Tensor], Tensor]]]
        sublayers = [(self._input_norm, attend), (self._post_norm, self._mlp)]
        for i, (norm, sublayer) in enumerate(sublayers):
            normed = self._norm(x, norm, self._eps)
            if self._convolutions:
                normed, kernels = self._convolutions[i].before(normed)
                x = x + self._convolutions[i].after(sublayer(normed), kernels)
            else:
                x = x + sublayer(normed)
        return x


class Backbone:
    """Projection of the target's states, draft layers, final norm."""

    def __init__(
        self, form: BlockForm, tensors: Mapping[str, Tensor], groups: tuple[int, ...], parts: DrafterParts
    ) -> None:
        """`groups`: of each layer, as `BlockLayer` takes it."""
        self._rms_norm, self._eps = parts.kernels.rms_norm, form.layer.eps
        self._fc = tensors["fc.weight"]
        self._hidden_norm, self._final_norm = tensors["hidden_norm.weight"], tensors["norm.weight"]
        self._layers = [BlockLayer(i, form, tensors, g, parts) for i, g in enumerate(groups)]

    def fill(self, states: list[Tensor], rows: Any) -> None:
        """Store the context of all rows: `states` [N, H] each, in the order of the form's taps."""
        context = self._rms_norm(F.linear(torch.cat(states, -1), self._fc), self._hidden_norm, self._eps)
        angles = self._layers[0].attention.angles(rows.positions, context.dtype)
        for layer in self._layers:
            layer.fill(context, rows, angles)

    def __call__(self, x: Tensor, rows: Any) -> Tensor:
        """Embedded blocks [S, B, H] that begin at the rows' positions, one row per sequence -> normed states
        [S, B, H]."""
        steps = torch.arange(x.shape[1], device=x.device)
        positions = rows.positions[:, None] + steps
        angles = self._layers[0].attention.angles(positions.flatten(), x.dtype)
        for layer in self._layers:
            x = layer(x, rows, positions, angles)
        return self._rms_norm(x, self._final_norm, self._eps)
