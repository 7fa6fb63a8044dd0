"""The executor's part around a block drafter: pools, tables, forwards of a toy target, chosen drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bien.core.api import DeviceDraft, DeviceSpeculator, DrafterParts
from bien.core.architectures.registry import read_architecture
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.models.registry import ModelParts, load_model
from bien.core.plan import i32
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer

BLOCK, SLOTS, LENGTH = 4, 4, 64
CPU = torch.device("cpu")
Work = list[tuple[int, int, list[int]]]
"""(slot, start, tokens)."""


class Chosen:
    """A `Drawer` that records laws and draws candidate number `picks[k][i]`, counted by token id."""

    def __init__(self, picks: list[list[int]]) -> None:
        self.picks = picks
        self.laws: list[list[dict[int, float]]] = []
        self.tokens: list[list[int]] = []

    def draw(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is None:
            ids = torch.arange(logits.shape[1])
        ids = ids.expand(logits.shape)
        pick = torch.tensor(self.picks[len(self.laws)])
        rows = [dict(zip(i.tolist(), s.tolist(), strict=True)) for i, s in zip(ids, logits, strict=True)]
        self.laws.append(rows)
        # By token id, not by place: selectors may name their candidates in any order.
        token = ids.sort(1).values.gather(1, pick[:, None])[:, 0]
        self.tokens.append(token.tolist())
        return token


def loaded(target: Path) -> tuple[Any, Any, TorchKernels]:
    """Architecture and model in float64."""
    architecture, kernels = read_architecture(target, BLOCK, "float64"), TorchKernels()
    parts = ModelParts(NoQuantizer(), Single(), kernels, torch.float64, CPU)
    with torch.inference_mode():
        return architecture, load_model(architecture, target, parts), kernels


class BlockBench:
    """Fresh pools full of noise; slots own blocks in a random order."""

    def __init__(
        self, drafter: DeviceSpeculator, architecture: Any, model: Any, kernels: TorchKernels
    ) -> None:
        self.drafter, self.model, self.kernels = drafter, model, kernels
        own = drafter.groups(architecture, BLOCK)
        groups = (*architecture.groups, *own)
        count = len(architecture.groups)

        def none(*_: Any) -> Any:
            raise NotImplementedError

        parts = DrafterParts(torch.float64, CPU, kernels, none, none)
        with torch.inference_mode():
            drafter.load(model, tuple(range(count, len(groups))), parts)
        rng, each = np.random.default_rng(3), LENGTH // BLOCK
        self.pools = tuple(Pool.allocate(g, SLOTS * each, CPU) for g in groups)
        for pool in self.pools:
            pool.data.normal_()
        self.tables = tuple(
            (rng.permutation(SLOTS * each) + 1).astype(np.int32).reshape(SLOTS, each) for _ in groups
        )

    def share(self, source: int, slot: int, tokens: int) -> None:
        """The slot's first blocks are those of `source`."""
        for table in self.tables:
            table[slot, : tokens // BLOCK] = table[source, : tokens // BLOCK]

    def absorb(self, work: Work, confirmed: list[int] | None = None) -> None:
        """A forward of the target, and what the drafter takes from it."""
        slots, starts, tokens = zip(*work, strict=True)
        counts = [len(t) for t in tokens]
        rows = self.rows(list(slots), list(starts), counts)
        rows.ids = torch.tensor([t for row in tokens for t in row])
        with torch.inference_mode():
            _, taps = self.model.forward(rows.ids, rows, self.drafter.caps.taps)
            self.drafter.absorb(rows, taps, torch.tensor(confirmed or counts))

    def propose(self, work: list[tuple[int, int, int]], picks: list[list[int]]) -> tuple[DeviceDraft, Chosen]:
        """(slot, position, last token) of each; `picks[k]`: which candidates are drawn for draft k."""
        slots, starts, last = zip(*work, strict=True)
        rows, drawer = self.rows(list(slots), list(starts), [1] * len(slots)), Chosen(picks)
        with torch.inference_mode():
            return self.drafter.propose(rows, torch.tensor(last), len(picks), drawer), drawer

    def rows(self, slots: list[int], starts: list[int], counts: list[int]) -> Rows:
        none = i32([0] * len(slots))
        return Rows(self.pools, self.tables, i32(slots), i32(starts), i32(counts), none, self.kernels, CPU)
