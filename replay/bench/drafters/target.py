"""A tiny byte-level target of the Llama shape, trained on the text of Python's standard library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from bien.core.testing.toy import SPECIAL, write_tokenizer
from bien.replay.bench.drafters.layers import Layer, RMSNorm, Shape, started

VOCAB = len(SPECIAL) + 256 + 1
MASK = VOCAB - 1  # a token that no text has
Progress = Callable[[int, float], None]
"""Told the step and its loss."""


class Body(nn.Module):
    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class Target(nn.Module):
    def __init__(self, shape: Shape | None = None, layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape or Shape()
        self.model = Body(self.shape, layers)
        self.lm_head = nn.Linear(self.shape.hidden, VOCAB, bias=False)
        started(self, seed)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, L] -> logits [B, L, V], and the states [B, L, H] that leave the embedding and each layer."""
        length = tokens.shape[1]
        at = torch.arange(length, device=tokens.device)[None]
        mask = torch.ones(1, length, length, dtype=torch.bool, device=tokens.device).tril()
        states = [self.model.embed_tokens(tokens)]
        for layer in self.model.layers:
            states.append(layer(states[-1], None, at, at, mask))
        return self.lm_head(self.model.norm(states[-1])), states

    def save(self, folder: Path) -> Path:
        """A model folder that bien loads."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "num_hidden_layers": len(self.model.layers),
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            "bos_token_id": 1,
            **self.shape.config(),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        save_file({n: w.contiguous() for n, w in self.state_dict().items()}, folder / "model.safetensors")
        write_tokenizer(folder)
        return folder


def standard_library(most: int = 3_000_000) -> tuple[Tensor, Tensor]:
    """(training, held-out) token ids of up to `most` bytes; every eighth file is held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    left = most
    for i, path in enumerate(paths):
        data = path.read_bytes()[:left]
        left -= len(data)
        parts[i % 8 == 7].append(data)
    return tuple(encoded(b"".join(part)) for part in parts)  # type: ignore[return-value]


def encoded(data: bytes) -> Tensor:
    """Token ids of bytes, as the byte-level tokenizer of the model folder has them."""
    return _IDS[torch.frombuffer(bytearray(data), dtype=torch.uint8).long()]


def _byte_ids() -> Tensor:
    # Byte-level alphabets write a byte that can be printed as itself and the others as characters from 256
    # on; the tokenizer's ids follow the order of the characters.
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    characters = [b if b in printed else next(others) for b in range(256)]
    order = sorted(characters)
    return torch.tensor([len(SPECIAL) + order.index(c) for c in characters])


_IDS = _byte_ids()


def windows(text: Tensor, count: int, length: int, source: torch.Generator) -> Tensor:
    """[count, length] pieces of a text from random places."""
    first = torch.randint(0, len(text) - length, (count, 1), generator=source)
    return text[first + torch.arange(length)]


def train_target(
    target: Target,
    text: Tensor,
    steps: int,
    seed: int,
    progress: Progress | None = None,
    *,
    batch: int = 16,
    length: int = 128,
) -> list[float]:
    """Adam over `steps` batches of random windows; the losses (nats per byte)."""
    source = torch.Generator().manual_seed(seed)
    rate = 3e-3
    optimizer = torch.optim.AdamW(target.parameters(), rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    losses = []
    for step in range(steps):
        tokens = windows(text, batch, length + 1, source)
        logits, _ = target(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(step, losses[-1])
    return losses
