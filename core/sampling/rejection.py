"""Rejection sampling of a drafted chain: which drafts are taken, and what takes the place of the first other.

Tokens x_1..x_n were drawn from q_1..q_n; the target's laws there are p_1..p_n (and p_{n+1} behind them).

standard   x_i is taken with chance p_i(x_i) / q_i(x_i); the first that is not is replaced by a draw from
           max(p_i - q_i, 0), normalised (Leviathan et al. 2023).
block      with w_0 = 1, w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1): the longest prefix is taken of which
           the last coin is at most h_i = s_i / (s_i + 1 - w_i), s_i = sum of max(w_i p_{i+1} - q_{i+1}, 0),
           h_n = w_n; then a draw from max(w_i p_{i+1} - q_{i+1}, 0), normalised (Sun et al., "Block
           verification accelerates speculative decoding", arXiv 2403.10444).

Both keep the target's law, and block takes at least as many drafts. All sums are in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bien.core.sampling.sampler import quantile


@dataclass(slots=True)
class Law:
    """What a draft was drawn from: probabilities (or weights) [C] of the tokens `ids` [C] int64; None: all,
    in order."""

    probabilities: Tensor
    ids: Tensor | None = None

    def dense(self, vocab: int) -> Tensor:
        """[vocab] float64"""
        wide = self.probabilities.to(torch.float64)
        wide = wide / wide.sum()
        if self.ids is None and len(wide) == vocab:
            return wide
        out = wide.new_zeros(vocab)
        if self.ids is None:
            out[: len(wide)] = wide
            return out
        return out.index_add_(0, self.ids, wide)


def judge_chain(
    rule: Literal["standard", "block"],
    p: Tensor,
    laws: list[Law],
    drafts: list[int],
    coins: list[float],
    u: float,
) -> tuple[int, int | None]:
    """(drafts that are taken, the token behind them; None where all are taken: it is the target's to draw).

    p: [n, V] float64, normalised: the target's law at each draft's position. coins, n, and u in [0, 1).
    """
    q = torch.stack([law.dense(p.shape[1]) for law in laws])
    index = torch.tensor(drafts, device=p.device)[:, None]
    ratio = (p.gather(1, index) / q.gather(1, index))[:, 0].tolist()
    if rule == "standard":
        failed = [coin >= r for coin, r in zip(coins, ratio, strict=True)]
        taken, weight = (failed.index(True) if any(failed) else len(drafts)), 1.0
    else:
        taken, weight = _longest(p, q, ratio, coins)
    if taken == len(drafts):
        return taken, None
    left = (weight * p[taken] - q[taken]).clamp_(min=0)
    # Where rounding leaves nothing the two laws are the same.
    rest = left if float(left.sum()) > 0 else p[taken]
    return taken, int(quantile(rest[None], torch.tensor([u], dtype=torch.float64, device=p.device)))


def _longest(p: Tensor, q: Tensor, ratio: list[float], coins: list[float]) -> tuple[int, float]:
    weights = [1.0]
    for r in ratio:
        weights.append(min(weights[-1] * r, 1.0))
    inner = torch.tensor(weights[1:-1], dtype=p.dtype, device=p.device)[:, None]
    spare = (inner * p[1:] - q[1:]).clamp_(min=0).sum(-1).tolist()
    bounds = [s / (s + 1 - w) if s + 1 - w > 0 else 1.0 for s, w in zip(spare, weights[1:-1], strict=True)]
    bounds.append(weights[-1])
    taken = 0
    for i, (bound, coin) in enumerate(zip(bounds, coins, strict=True), 1):
        if coin < bound:
            taken = i
    return taken, weights[taken]
