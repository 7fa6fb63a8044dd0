"""`Bench`: a toy target, a drafter, pools whose unwritten entries hold garbage, ragged steps. float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bien.core.architectures.registry import read_architecture
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.models.mtp import load_predicting
from bien.core.models.registry import ModelParts, load_model
from bien.core.plan import i32
from bien.core.speculation.speculator import DeviceDraft, DrafterParts
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer

BLOCK, SLOTS, LENGTH = 4, 4, 64
CPU = torch.device("cpu")
DTYPE = torch.float64


class Recorder:
    """A `Drawer` that takes the largest, and keeps what it was given."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def draw(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        self.logits.append(logits)
        best = logits.argmax(-1)
        return best if ids is None else ids[best]


class Target:
    """A loaded toy model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.architecture = read_architecture(folder, BLOCK, "float64")
        self.kernels = TorchKernels()
        self.parts = ModelParts(NoQuantizer(), Single(), self.kernels, DTYPE, CPU)
        with torch.inference_mode():
            self.model: Any = load_model(self.architecture, folder, self.parts)

    def drafter_parts(self) -> DrafterParts:
        def whole(folder: str | Path) -> Any:
            return load_model(read_architecture(folder, BLOCK, "float64"), Path(folder), self.parts)

        def predicting() -> list[Any]:
            return list(load_predicting(self.architecture, self.folder, self.model, self.parts))

        return DrafterParts(DTYPE, CPU, self.kernels, whole, predicting)

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> list[Tensor]:
        """Of a whole text: states [T, hidden] that enter layer 0, 1, ..., and that leave the last."""
        groups = self.architecture.groups
        blocks = -(-len(tokens) // BLOCK)
        pools = tuple(Pool.allocate(g, blocks, CPU) for g in groups)
        tables = tuple(np.arange(1, blocks + 1, dtype=np.int32)[None] for _ in groups)
        ids = torch.tensor(tokens)
        rows = Rows(
            pools, tables, i32([0]), i32([0]), i32([len(tokens)]), i32([0]), self.kernels, CPU, ids=ids
        )
        found = [self.model.embed(ids)]
        for layer in self.model.layers:
            found.append(layer(found[-1], rows))
        return found


class Bench:
    """A work item is (slot, start, tokens), or with a fourth member: how many of its tokens are confirmed."""

    def __init__(self, target: Target, drafter: Any, seed: int = 0) -> None:
        self.target, self.drafter = target, drafter
        own = drafter.groups(target.architecture, BLOCK)
        self.groups = (*target.architecture.groups, *own)
        first = len(target.architecture.groups)
        with torch.inference_mode():
            indices = tuple(range(first, len(self.groups)))
            drafter.load(target.model, indices, target.drafter_parts())
        rng, each = np.random.default_rng(seed), LENGTH // BLOCK
        self.pools = tuple(Pool.allocate(g, SLOTS * each, CPU) for g in self.groups)
        noise = torch.Generator().manual_seed(seed)
        for pool in self.pools:
            pool.data.normal_(generator=noise)
        self.tables = tuple(
            (rng.permutation(SLOTS * each) + 1).astype(np.int32).reshape(SLOTS, each) for _ in self.groups
        )

    def share(self, source: int, slot: int, tokens: int) -> None:
        """The slot's first blocks are those of `source`."""
        for table in self.tables:
            table[slot, : tokens // BLOCK] = table[source, : tokens // BLOCK]

    @torch.inference_mode()
    def absorb(self, *work: tuple[Any, ...]) -> None:
        slots, starts, texts = (list(x) for x in zip(*(w[:3] for w in work), strict=True))
        ids = torch.tensor([t for text in texts for t in text])
        rows = self._rows(slots, starts, [len(t) for t in texts], ids)
        taps = self.target.model.forward(ids, rows, self.drafter.caps.taps)[1]
        confirmed = [w[3] if len(w) > 3 else len(w[2]) for w in work]
        self.drafter.absorb(rows, taps, torch.tensor(confirmed))

    @torch.inference_mode()
    def propose(self, *work: tuple[int, int, int], limit: int = 0) -> tuple[DeviceDraft, list[Tensor]]:
        """(slot, position, last token) -> the draft, and the logits [S, C] of every draw."""
        slots, positions, tokens = (list(x) for x in zip(*work, strict=True))
        last, drawer = torch.tensor(tokens), Recorder()
        rows = self._rows(slots, positions, [1] * len(slots), last)
        limit = limit or self.drafter.caps.max_drafts
        return self.drafter.propose(rows, last, limit, drawer), drawer.logits

    def _rows(self, slots: list[int], starts: list[int], counts: list[int], ids: Tensor) -> Rows:
        none, kernels = i32([0] * len(slots)), self.target.kernels
        return Rows(
            self.pools, self.tables, i32(slots), i32(starts), i32(counts), none, kernels, CPU, ids=ids
        )


def text(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, length)]


def feed(bench: Bench, slot: int, tokens: list[int], way: str) -> None:
    """Let the drafter absorb a text: the ways in which it may come."""
    n = len(tokens)
    other = text(99, 40)
    if way == "whole":
        bench.absorb((slot, 0, tokens))
    elif way == "chunks":
        at = 0
        for count in (1, 5, 3, 4, 1, 1, 99):
            if at < n:
                bench.absorb((slot, at, tokens[at : at + count]))
                at += count
    elif way == "ragged":  # others beside it, behind and before
        third = max(1, n // 3)
        bench.absorb((slot, 0, tokens[:third]), (0, 0, other[:7]))
        bench.absorb((0, 7, other[7:9]), (slot, third, tokens[third:]), (3, 0, other[9:20]))
    elif way == "hit":  # another slot's blocks, then the tail
        shared = (n - 1) // BLOCK * BLOCK
        if shared:
            bench.absorb((0, 0, tokens[:shared] + other[:3]))
            bench.share(0, slot, shared)
        bench.absorb((slot, shared, tokens[shared:]))
    else:  # drafts: rejected, accepted in part, and wholly
        at = min(2, n)
        bench.absorb((slot, 0, tokens[:at]))
        for right in (0, 2, 1, 3, 0, 0, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3):
            if at >= n:
                break
            bench.propose((slot, at, tokens[at]))
            right = min(right, n - at - 1)
            wrong = [(t + 1) % 259 for t in (tokens + other)[at + 1 + right : at + 4]]
            bench.absorb((slot, at, tokens[at : at + 1 + right] + wrong, 1 + right))
            at += 1 + right


WAYS = ("whole", "chunks", "ragged", "hit", "drafts")
