"""`Network`: EAGLE-3's one layer, its fused input and its head, on flat arrays of N nodes. Needs torch.

Li et al., "EAGLE-3" (2025). A node pairs the token at p with the state behind p - 1: of a confirmed position
three hidden states of the target, fused; of a draft what the layer made of the node before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import DrafterParts, TargetHandle
from bien.plugins.speculators._network import Attention, Mlp, chances, load_tensors, vocabulary
from bien.plugins.speculators.eagle3.form import KIND, Form


class Network:
    """`ids`: the token of every index of the draft vocabulary; None: they are the same."""

    def __init__(self, form: Form, target: TargetHandle, parts: DrafterParts) -> None:
        self.form, self._kernels, self._eps = form, parts.kernels, form.layer.eps
        needed, spare = form.tensors()
        tensors = load_tensors(Path(form.folder), needed, spare, parts, KIND)
        self.ids = vocabulary(tensors, form.draft_vocab, form.vocab, Path(form.folder), KIND)
        self.place: Tensor | None = None  # index in the draft vocabulary of every token
        if self.ids is not None:
            self.place = torch.zeros(form.vocab, dtype=torch.int64, device=parts.device)
            self.place[self.ids] = torch.arange(form.draft_vocab, device=parts.device)
        self.embed: Callable[[Tensor], Tensor] = target.embed
        if "embed_tokens.weight" in tensors:
            table = tensors["embed_tokens.weight"]
            self.embed = lambda tokens: F.embedding(tokens, table)
        self._fc = tensors["fc.weight"]
        self._each = [tensors[f"fc_norm.{i}.weight"] for i in range(form.states)] if form.fc_norm else []
        self._all = tensors.get("input_norm.weight")
        p = form.prefix
        self._word_norm = tensors[f"{p}input_layernorm.weight"]
        self._state_norm = tensors[f"{p}hidden_norm.weight"]
        self._post_norm = tensors[f"{p}post_attention_layernorm.weight"]
        self.attention = Attention(tensors, f"{p}self_attn.", form.layer, parts)
        self._mlp = Mlp(tensors, f"{p}mlp.", parts)
        self._norm, self._head = tensors["norm.weight"], tensors["lm_head.weight"]

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """The target's tapped states, each [N, target's hidden] -> [N, hidden]."""
        if self._each:
            taps = [self._rms(x, weight) for x, weight in zip(taps, self._each, strict=True)]
        joined = torch.cat(taps, -1)
        return F.linear(joined if self._all is None else self._rms(joined, self._all), self._fc)

    def entries(self, states: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Keys and values [N, width] of nodes: the states before them [N, hidden], tokens and positions
        [N] int64."""
        x, _ = self._inputs(states, tokens)
        return self.attention.entries(x, self.attention.angles(positions, x.dtype))

    def enter(self, states: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(queries [N, heads, d], keys and values [N, width], residual [N, hidden]) of nodes."""
        x, residual = self._inputs(states, tokens)
        query, entry = self.attention.project(x, self.attention.angles(positions, x.dtype))
        return query, entry, residual

    def leave(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """What attention has found [N, heads * d] -> (states for the nodes behind these [N, hidden], logits
        over the draft vocabulary)."""
        hidden, normed = self._kernels.add_rms_norm(
            residual, self.attention.out(mixed), self._post_norm, self._eps
        )
        hidden = hidden + self._mlp(normed)
        normed = self._rms(hidden, self._norm)
        return normed if self.form.norm_output else hidden, F.linear(normed, self._head)

    def chance(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[N] the drafter's own probability of `tokens` [N]."""
        return chances(logits, tokens if self.place is None else self.place[tokens])

    def _inputs(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._rms(states, self._state_norm)
        x = torch.cat([self._rms(self.embed(tokens), self._word_norm), normed], -1)
        return x, normed if self.form.norm_before_residual else states

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._eps)
