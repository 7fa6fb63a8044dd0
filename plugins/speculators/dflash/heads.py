"""What reads a block's states from left to right: DSpark's Markov heads and confidence, DFlash 2's selector.

DeepSeek, "DSpark" (arXiv 2607.05147): a slot's logits get a bias by the token *before* the one it predicts,
the last token for the first slot. Confidence is the chance that the target takes what is drawn, whatever that
will be: it is made of the slot's state and, at most, the token before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.plugins.speculators.dflash.form import BlockForm


class Markov:
    """W2 W1[token before]: the bias of a chain of first order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.words = tensors["markov_head.markov_w1.weight"]  # [vocab, rank]
        self.out = tensors["markov_head.markov_w2.weight"]  # [candidates, rank]

    def start(self, hidden: Tensor) -> Tensor | None:
        """What is carried through a block; hidden [S, H] of its first slot that predicts."""
        return None

    def step(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens [S] before, the slot's state [S, H] -> bias [S, candidates], what is carried on."""
        return F.linear(F.embedding(before, self.words), self.out), state


class GatedMarkov(Markov):
    """W2 (sigmoid(G [hidden; W1[token before]]) * W1[token before])."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._gate = tensors["markov_head.gate_proj.weight"]
        self._gate_bias = tensors["markov_head.gate_proj.bias"]

    def step(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        word = F.embedding(before, self.words)
        gate = F.linear(torch.cat([hidden, word], -1), self._gate, self._gate_bias).sigmoid()
        return F.linear(gate * word, self.out), state


class RecurrentMarkov(Markov):
    """A gated recurrent state of [state; W1[token before]; hidden], zero at the start of a block."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._joint = tensors["markov_head.joint_proj.weight"]
        self._joint_bias = tensors["markov_head.joint_proj.bias"]

    def start(self, hidden: Tensor) -> Tensor | None:
        return hidden.new_zeros(len(hidden), self.words.shape[1])

    def step(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert state is not None, "start comes before step"
        word = F.embedding(before, self.words)
        joint = F.linear(torch.cat([state, word, hidden], -1), self._joint, self._joint_bias)
        gate, candidate, out = joint.chunk(3, -1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return F.linear(out.tanh(), self.out), state


HEADS: dict[str, type[Markov]] = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}


class Confidence:
    """sigmoid(w [hidden; W1[token before]] + b), or of the state alone."""

    def __init__(self, tensors: Mapping[str, Tensor], words: Tensor | None) -> None:
        """`words`: W1 of the Markov head; None where the head sees the state only."""
        self._weight, self._bias = (
            tensors["confidence_head.proj.weight"],
            tensors["confidence_head.proj.bias"],
        )
        self._words = words

    def __call__(self, before: Tensor, hidden: Tensor) -> Tensor:
        """[S] tokens before, [S, H] -> [S] in 0..1."""
        if self._words is not None:
            hidden = torch.cat([hidden, F.embedding(before, self._words)], -1)
        return F.linear(hidden, self._weight, self._bias)[:, 0].sigmoid()


class Selector:
    """DFlash 2: of each slot the likeliest candidates, scored by their logits and by how they follow the
    token before, given the slot's state."""

    def __init__(self, tensors: Mapping[str, Tensor], form: BlockForm) -> None:
        self._count = form.selector_top_k
        prefix = "candidate_selector."
        self._before = tensors[f"{prefix}predecessor_codebook"]
        self._after = tensors[f"{prefix}successor_codebook"]
        self._projection = tensors[f"{prefix}hidden_projection.weight"]

    def step(self, before: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [S] before, state [S, H] and logits [S, vocab] of the slot -> (scores, token ids) [S, k]."""
        values, ids = logits.topk(self._count, -1)
        link = F.embedding(before, self._before) * F.linear(hidden, self._projection)
        scores = values + (F.embedding(ids, self._after) * link[:, None]).sum(-1)
        return scores, ids
