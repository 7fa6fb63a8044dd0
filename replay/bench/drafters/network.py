"""DFlash and DSpark drafters to train: z-lab (arXiv 2602.06036) and DeepSeek (arXiv 2607.05147).

A block is the anchor (the last token that is known) and masks behind it; in every layer its slots see the
projected states of the target before the anchor, and one another. Each slot predicts the token behind its
position. DSpark adds a bias by the token before (`markov_head`), and the chance of being accepted
(`confidence_head`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bien.replay.bench.drafters.layers import Layer, RMSNorm, Shape, started
from bien.replay.bench.drafters.target import MASK, VOCAB, Target


class Markov(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(VOCAB, rank)
        self.markov_w2 = nn.Linear(rank, VOCAB, bias=False)


class Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class Drafter(nn.Module):
    """`rank` above 0: DSpark's, with Markov and confidence heads; 0: DFlash's, from the anchor on."""

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...] = (0, 1),
        *,
        layers: int = 2,
        block: int = 7,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        shape = target.shape
        self.shape = Shape(**{**shape.__dict__, "normed": True})
        self.taps, self.block, self.rank = taps, block, rank
        self.target_layers = len(target.model.layers)
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(Layer(self.shape) for _ in range(layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        if rank:
            self.markov_head, self.confidence_head = Markov(rank), Confidence(shape.hidden + rank)
        started(self, seed)
        # Frozen, the target's own: not parameters of this module.
        self._embed = [target.model.embed_tokens]
        self._head = [target.lm_head]

    def forward(self, states: list[Tensor], tokens: Tensor, anchors: Tensor) -> Tensor:
        """`states` as `Target` gives them ([B, L, H]), tokens [B, L], anchors [B, A] positions ->
        hidden [B, A, block, H] of the slots, normed."""
        rows, length = tokens.shape
        count = anchors.shape[1]
        device = tokens.device
        context = self.hidden_norm(self.fc(torch.cat([states[tap + 1] for tap in self.taps], -1)))
        slots = torch.full((rows, count, self.block), MASK, device=device)
        slots[:, :, 0] = tokens.gather(1, anchors)
        at = (anchors[:, :, None] + torch.arange(self.block, device=device)).flatten(1)
        before = torch.arange(length, device=device).expand(rows, -1)
        owner = torch.arange(count, device=device).repeat_interleave(self.block)
        first = anchors.repeat_interleave(self.block, 1)[:, :, None]
        own = (owner[:, None] == owner).expand(rows, -1, -1)
        mask = torch.cat([before[:, None] < first, own], 2)
        x = self._embed[0](slots.flatten(1))
        for layer in self.layers:
            x = layer(x, context, at, torch.cat([before, at], 1), mask)
        return self.norm(x).unflatten(1, (count, self.block))  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[..., H] of slots and the tokens [...] before what they predict -> [..., V]."""
        base: Tensor = self._head[0](hidden)
        if not self.rank:
            return base
        return base + self.markov_head.markov_w2(self.markov_head.markov_w1(previous))  # type: ignore[no-any-return]

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logit of the chance that the target takes what the slot predicts, [...]."""
        features = torch.cat([hidden, self.markov_head.markov_w1(previous)], -1)
        return self.confidence_head.proj(features)[..., 0]  # type: ignore[no-any-return]

    def save(self, folder: Path) -> Path:
        """A checkpoint folder in DeepSpec's format."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "num_hidden_layers": len(self.layers),
            "layer_types": ["full_attention"] * len(self.layers),
            "num_target_layers": self.target_layers,
            "target_layer_ids": list(self.taps),
            "block_size": self.block,
            "mask_token_id": MASK,
            "markov_rank": self.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.rank > 0,
            "confidence_head_with_markov": self.rank > 0,
            **self.shape.config(),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        weights = {name: weight.contiguous() for name, weight in self.state_dict().items()}
        weights["embed_tokens.weight"] = self._embed[0].weight.detach().clone()
        weights["lm_head.weight"] = self._head[0].weight.detach().clone()
        save_file(weights, folder / "model.safetensors")
        return folder
