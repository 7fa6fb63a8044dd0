"""How many drafts a target takes: speculative decoding with real rejection sampling, many texts at a time.

Dense and slow, but the thing itself (Leviathan et al. 2023): a draft x is taken with chance
min(1, p(x)/q(x)), and behind the first that is not, a token is drawn from what p has above q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bien.replay.bench.drafters.network import Drafter
from bien.replay.bench.drafters.target import Target


@dataclass
class Proposal:
    """Drafts for B texts; what lies behind a text's `count` is not one of them."""

    tokens: Tensor  # [B, n]
    count: Tensor  # [B]
    law: Tensor | None = None  # [B, n, V] what they were drawn from; None: they are certain
    chance: Tensor | None = None  # [B, n] that a draft is taken once those before it are


Propose = Callable[[list[Tensor], Tensor, Tensor, torch.Generator], Proposal]
"""(the target's states, tokens [B, L], lengths [B], noise): the last known token is not computed yet."""


@dataclass
class Rounds:
    """Of all texts and rounds, one after the other."""

    taken: list[Tensor] = field(default_factory=list)
    drafted: list[Tensor] = field(default_factory=list)
    chance: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Tokens gained per round, the target's own included."""
        return 1 + float(torch.cat(self.taken).float().mean())

    def by_position(self) -> list[float]:
        """The share of drafts that are taken, of those whose predecessors all are."""
        taken, drafted = torch.cat(self.taken), torch.cat(self.drafted)
        found = []
        for k in range(int(drafted.max())):
            reached = (drafted > k) & (taken >= k)
            found.append(float((taken[reached] > k).float().mean()) if bool(reached.any()) else float("nan"))
        return found


def speculate(
    target: Target,
    propose: Propose,
    contexts: Tensor,
    rounds: int,
    seed: int,
    *,
    most: int = 7,
    temperature: float = 1.0,
) -> Rounds:
    """`rounds` rounds behind each of contexts [B, L], of at most `most` drafts. `temperature` 0: greedy."""
    noise = torch.Generator().manual_seed(seed)
    count, length = contexts.shape
    tokens = torch.zeros(count, length + (rounds + 1) * (most + 1), dtype=torch.int64)
    tokens[:, :length] = contexts
    lengths = torch.full((count,), length)
    row, found = torch.arange(count), Rounds()
    with torch.inference_mode():
        _, states = target(tokens[:, :length])
        for _ in range(rounds):
            drafts = propose(states, tokens, lengths, noise)
            n = drafts.tokens.shape[1]
            end = int(lengths.max()) + n
            at = lengths[:, None] + torch.arange(n)
            tokens[row[:, None], at] = drafts.tokens
            logits, states = target(tokens[:, :end])
            place = lengths[:, None] - 1 + torch.arange(n + 1)
            law = _law(logits[row[:, None], place], temperature)
            taken, own = _judge(law, drafts, noise)
            tokens[row, lengths + taken] = own
            lengths = lengths + taken + 1
            found.taken.append(taken)
            found.drafted.append(drafts.count)
            if drafts.chance is not None:
                found.chance.append(drafts.chance)
    return found


def _judge(law: Tensor, drafts: Proposal, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    # Per text: how many drafts are taken, and the token behind them.
    texts, n = drafts.tokens.shape
    chosen = drafts.tokens[..., None]
    p = law[:, :n].gather(2, chosen)[..., 0]
    q = torch.ones_like(p) if drafts.law is None else drafts.law.gather(2, chosen)[..., 0]
    coin = torch.rand(p.shape, generator=noise)
    good = (coin * q < p) & (torch.arange(n) < drafts.count[:, None])
    taken = good.int().cumprod(1).sum(1)
    row = torch.arange(texts)
    behind = law[row, taken]
    if drafts.law is None:
        less = torch.zeros_like(law[:, :n]).scatter_(2, chosen, 1.0)
    else:
        less = drafts.law
    refused = taken < drafts.count
    index = taken.clamp(max=n - 1)
    rest = (behind - less[row, index]).clamp(min=0)
    rest = torch.where((refused & (rest.sum(1) > 1e-8))[:, None], rest, behind)
    return taken, torch.multinomial(rest, 1, generator=noise)[:, 0]


def _law(logits: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return (logits.float() / temperature).softmax(-1)


def drafted(drafter: Drafter, temperature: float = 1.0) -> Propose:
    """By a network."""

    def propose(states: list[Tensor], tokens: Tensor, lengths: Tensor, noise: torch.Generator) -> Proposal:
        known = tokens[:, : states[0].shape[1] + 1]
        states = [torch.cat([s, torch.zeros_like(s[:, : known.shape[1] - s.shape[1]])], 1) for s in states]
        hidden = drafter(states, known, lengths[:, None] - 1)[:, 0]
        previous = tokens[torch.arange(len(tokens)), lengths - 1]
        drafts, laws, chances = [], [], []
        for k in range(drafter.block):
            law = _law(drafter.logits(hidden[:, k], previous), temperature)
            if drafter.rank:
                chances.append(drafter.confidence(hidden[:, k], previous).sigmoid())
            previous = torch.multinomial(law, 1, generator=noise)[:, 0]
            drafts.append(previous)
            laws.append(law)
        count = torch.full((len(tokens),), drafter.block)
        chance = torch.stack(chances, 1) if chances else None
        return Proposal(torch.stack(drafts, 1), count, torch.stack(laws, 1), chance)

    return propose


def matched(most: int = 7) -> Propose:
    """What followed the longest match of a text's end inside it, the last such place."""

    def propose(states: list[Tensor], tokens: Tensor, lengths: Tensor, noise: torch.Generator) -> Proposal:
        drafts = torch.zeros(len(tokens), most, dtype=torch.int64)
        counts = torch.zeros(len(tokens), dtype=torch.int64)
        for i, (row, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
            found = _follow(row[:length], most)
            counts[i] = len(found)
            drafts[i, : len(found)] = torch.tensor(found, dtype=torch.int64)
        return Proposal(drafts, counts)

    return propose


def _follow(text: list[int], most: int) -> list[int]:
    best, where = 0, 0
    for end in range(len(text) - 1, 0, -1):
        n = 0
        while n < end and text[end - 1 - n] == text[-1 - n]:
            n += 1
        if n > best:
            best, where = n, end
    return text[where : where + most] if best else []
