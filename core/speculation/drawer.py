"""`RoundDrawer`: the core's `Drawer`, and what it remembers of the laws that drafts were drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bien.core.sampling.gumbel import largest
from bien.core.sampling.rejection import Law
from bien.core.sampling.rng import Purpose, uniforms
from bien.core.sampling.sampler import COLDEST, quantile
from bien.core.speculation.options import SpeculationSpec


@dataclass(slots=True)
class Draw:
    """One call: a node of every warm sequence."""

    tokens: Tensor  # [S] int64, of all sequences
    weights: Tensor  # [W, C] probabilities, of the warm ones
    ids: Tensor | None  # [C] or [W, C]

    def law(self, row: int) -> Law:
        return Law(self.weights[row], self.ids if self.ids is None or self.ids.dim() == 1 else self.ids[row])


@dataclass(slots=True)
class RoundDrawer:
    """Sequence i of a `propose` call drafts from position[i] on, counted from its prompt's end.

    Where the verification draws the target's own token at each position (`invariant`), sampled drafts share
    that position's noise. Where it tests them against their law, their noise is their own, and the round's:
    what a rejection test has looked at is used for no later round.
    """

    spec: SpeculationSpec
    deterministic: bool  # as the drafter's caps say
    seeds: NDArray[np.uint64]  # [S]
    choices: NDArray[np.uint64]
    temperature: NDArray[np.float64]
    positions: NDArray[np.int64]
    draws: list[Draw] = field(default_factory=list)
    warm: NDArray[np.int64] = field(init=False)  # the sequences whose drafts are sampled

    def __post_init__(self) -> None:
        sampled = np.zeros(len(self.seeds), bool) if self.deterministic else self.temperature >= COLDEST
        self.warm = np.flatnonzero(sampled)

    @property
    def tested(self) -> bool:
        """Whether verification asks for the laws of drafts."""
        return self.spec.verification != "invariant"

    def draw(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """See `Drawer.draw`."""
        best = logits.argmax(-1)
        tokens = best if ids is None else _of(ids, best)
        if not len(self.warm):
            return tokens
        device, number = logits.device, len(self.draws)
        warm = torch.from_numpy(self.warm).to(device)
        wide = torch.promote_types(logits.dtype, torch.float32)
        heat = torch.from_numpy(self.temperature[self.warm]).to(device, wide)[:, None]
        weights = torch.softmax(logits.index_select(0, warm).to(wide) / heat, -1)
        own = ids if ids is None or ids.dim() == 1 else ids.index_select(0, warm)
        tokens = tokens.index_copy(0, warm, self._sampled(weights, own, number))
        self.draws.append(Draw(tokens, weights, own))
        return tokens

    def laws(self, sequence: int) -> list[Law] | None:
        """Of the nodes of a sequence, in order; None where they are not sampled, or nobody will ask."""
        if not self.tested or not len(self.warm):
            return None
        row = int(np.searchsorted(self.warm, sequence))
        if row == len(self.warm) or self.warm[row] != sequence:
            return None
        return [d.law(row) for d in self.draws]

    def _sampled(self, weights: Tensor, ids: Tensor | None, number: int) -> Tensor:
        seeds, choices, first = self.seeds[self.warm], self.choices[self.warm], self.positions[self.warm]
        if self.tested:
            own = uniforms(seeds, first, choice=choices, purpose=Purpose.DRAFT, index=number)
            found = quantile(weights, torch.from_numpy(own).to(weights.device))
        elif self.spec.noise == "gumbel":
            found = largest(weights, seeds, first + number, choices, ids)
        else:
            u = torch.from_numpy(uniforms(seeds, first + number, choice=choices)).to(weights.device)
            if ids is not None:  # the target's quantiles go by token
                order = ids.argsort(-1).expand(len(weights), -1)
                found = order.gather(1, quantile(weights.gather(1, order), u)[:, None])[:, 0]
            else:
                found = quantile(weights, u)
        return found if ids is None else _of(ids, found)


def _of(ids: Tensor, index: Tensor) -> Tensor:
    return ids[index] if ids.dim() == 1 else ids.gather(1, index[:, None])[:, 0]
