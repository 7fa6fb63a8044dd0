"""Training of tiny drafters by step budget: reads the target's states on the fly, stores nothing.

DeepSeek's recipe (arXiv 2607.05147): anchors at random places, blocks that see what is before them only,
0.1 cross-entropy + 0.9 distance of distributions + cross-entropy of the confidence, weighted exp(-k / 4) over
a block's slots. DFlash's own: cross-entropy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bien.replay.bench.drafters.network import Drafter
from bien.replay.bench.drafters.target import Progress, Target, windows


@dataclass(frozen=True)
class Recipe:
    """Weights of the loss's terms, and how much is seen."""

    entropy: float = 1.0
    distance: float = 0.0  # total variation between drafter and target
    confidence: float = 0.0
    decay: float = 4.0
    batch: int = 8
    length: int = 128
    anchors: int = 12
    rate: float = 3e-3


CE_ONLY = Recipe()
DISTANCE = Recipe(entropy=0.1, distance=0.9)
SPARK = Recipe(entropy=0.1, distance=0.9, confidence=1.0)


def train_drafter(
    drafter: Drafter,
    target: Target,
    text: Tensor,
    recipe: Recipe,
    steps: int,
    seed: int,
    progress: Progress | None = None,
) -> list[float]:
    """Returns the losses. The target is left as it is."""
    source = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(drafter.parameters(), recipe.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.rate, total_steps=steps + 1, pct_start=0.1
    )
    losses = []
    for step in range(steps):
        tokens = windows(text, recipe.batch, recipe.length, source)
        loss = block_loss(drafter, target, tokens, recipe, source)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(step, losses[-1])
    return losses


def block_loss(
    drafter: Drafter, target: Target, tokens: Tensor, recipe: Recipe, source: torch.Generator
) -> Tensor:
    """Of tokens [B, L], at `recipe.anchors` random anchors of each row."""
    rows, length = tokens.shape
    block = drafter.block
    with torch.no_grad():
        logits, states = target(tokens)
    chances = torch.rand(rows, length - block - 1, generator=source)
    anchors = chances.topk(recipe.anchors, 1).indices + 1
    hidden = drafter(states, tokens, anchors)
    place = anchors[:, :, None] + torch.arange(block)  # of the token before what a slot predicts
    row = torch.arange(rows)[:, None, None]
    previous, labels = tokens[row, place], tokens[row, place + 1]
    scores = drafter.logits(hidden, previous)
    weight = torch.exp(-torch.arange(block) / recipe.decay)
    weight = weight / weight.sum()
    entropy = F.cross_entropy(scores.flatten(0, 2), labels.flatten(), reduction="none")
    loss = recipe.entropy * entropy.view_as(labels)
    if recipe.distance or recipe.confidence:
        apart = 0.5 * (scores.softmax(-1) - logits[row, place].softmax(-1)).abs().sum(-1)
        loss = loss + recipe.distance * apart
    if recipe.confidence:
        taken = 1 - apart.detach()
        found = drafter.confidence(hidden, previous)
        loss = loss + recipe.confidence * F.binary_cross_entropy_with_logits(found, taken, reduction="none")
    return (loss.mean((0, 1)) * weight).sum()
