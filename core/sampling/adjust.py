"""`Adjustment`: what a request changes about the model's logits before anything is drawn from them.

In this order: repetition penalty, frequency and presence penalty, logit bias, then the tokens that would
end the answer too early; after it temperature, top-k, top-p, min-p (sampler.py). It is SGLang's order
(penalties, bias, temperature, top-k, top-p, min-p); vLLM adds the bias before the penalties, and cuts by
min-p before top-k and top-p. Penalties as in both: repetition (Keskar et al. 2019, "CTRL": positive logits
are divided by it, others multiplied) for tokens of prompt and output, presence and frequency (OpenAI's:
subtracted once, and per occurrence) for tokens of the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bien.core.request import SamplingParams

Ids = NDArray[np.int64]


@dataclass(slots=True, frozen=True, eq=False)
class Adjustment:
    """Made once per sequence, and only for those that ask for any of it. Ids outside the vocabulary have
    no effect."""

    repetition: float
    frequency: float
    presence: float
    biased: Ids
    bias: NDArray[np.float64]
    ends: Ids  # tokens that end the answer
    min_tokens: int  # output tokens before one of `ends` may be drawn

    @classmethod
    def of(cls, sampling: SamplingParams, ends: tuple[int, ...] = ()) -> Adjustment | None:
        """None: the logits stay as they are."""
        s = sampling
        ends = ends if s.min_tokens > 0 else ()
        penal = s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0
        if not (penal or s.logit_bias or ends):
            return None
        return cls(
            s.repetition_penalty,
            s.frequency_penalty,
            s.presence_penalty,
            np.array([i for i, _ in s.logit_bias], np.int64),
            np.array([b for _, b in s.logit_bias], np.float64),
            np.array(sorted(set(ends)), np.int64),
            s.min_tokens,
        )

    def apply(self, logits: Tensor, history: Ids, prompt: int) -> None:
        """Change a row of logits ([V], float32 or float64) in place. history: every token before the one to
        be drawn, of which the first `prompt` are the prompt; behind drafts it holds the drafts."""
        if self.repetition != 1:
            at = _on(np.flatnonzero(np.bincount(history)), logits)
            seen = logits[at]
            logits[at] = torch.where(seen > 0, seen / self.repetition, seen * self.repetition)
        output = history[prompt:]
        if len(output) and (self.frequency or self.presence):
            counts = np.bincount(output)
            said = np.flatnonzero(counts)
            amount = counts[said] * np.float64(self.frequency) + self.presence
            logits[_on(said, logits)] -= _values(amount, logits)
        if len(self.biased):
            inside = self.biased < len(logits)
            logits[_on(self.biased[inside], logits)] += _values(self.bias[inside], logits)
        if len(output) < self.min_tokens and len(self.ends):
            self._forbid_ends(logits)

    def _forbid_ends(self, logits: Tensor) -> None:
        at = _on(self.ends[self.ends < len(logits)], logits)
        before = logits[at]
        logits[at] = -torch.inf
        # Where nothing else may be drawn, an end beats no token at all.
        if not bool(logits.amax() > -torch.inf):
            logits[at] = before


def _on(ids: Ids, logits: Tensor) -> Tensor:
    return torch.from_numpy(ids).to(logits.device)


def _values(amount: NDArray[np.float64], logits: Tensor) -> Tensor:
    return torch.from_numpy(amount).to(logits.device, logits.dtype)
