"""`Bench`: a target, a device drafter and KV pools, and the executor's part played around them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bien.core.architectures.registry import read_architecture
from bien.core.executors.make import drafter_parts
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.models.registry import CausalModel, ModelParts, load_model
from bien.core.parallel.whole import Whole
from bien.core.plan import i32
from bien.core.speculation.drawer import RoundDrawer
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import DeviceDraft, DeviceSpeculator

BLOCK, SLOTS, LENGTH = 4, 4, 64
_CPU = torch.device("cpu")


class Tried(Protocol):
    """What the bench needs of a suite."""

    layers: int
    temperature: float

    def build(self) -> DeviceSpeculator: ...

    def target(self, folder: Path) -> Path: ...


class Bench:
    """Target, drafter and pools; a work item is (slot, start, tokens)."""

    drawer: RoundDrawer  # of the last `propose`

    def __init__(self, suite: Tried, garbage: int, block: int = BLOCK) -> None:
        folder, self.model, self.kernels = _load(type(suite).target, suite)
        self.architecture = read_architecture(folder, block, "float64")
        self.drafter = suite.build()
        own = self.drafter.groups(self.architecture, block)
        self.groups = (*self.architecture.groups, *own)
        indices = tuple(range(len(self.architecture.groups), len(self.groups)))
        parts = ModelParts(_Plain(), Whole(), self.kernels, torch.float64, _CPU)
        with torch.inference_mode():
            given = drafter_parts(self.architecture, folder, self.model, parts)
            self.drafter.load(self.model, indices, given)
        self._garbage, self._block, self._temperature = garbage, block, suite.temperature
        self.clear()

    def clear(self) -> None:
        """Pools as new; a slot owns the blocks of a random order."""
        rng = np.random.default_rng(9)
        each = LENGTH // self._block
        self.pools = tuple(Pool.allocate(g, SLOTS * each, _CPU) for g in self.groups)
        noise = torch.Generator().manual_seed(self._garbage)
        for pool in self.pools:
            pool.data.normal_(generator=noise)
        self.tables = tuple(
            (rng.permutation(SLOTS * each) + 1).astype(np.int32).reshape(SLOTS, each) for _ in self.groups
        )

    def share(self, source: int, slot: int, tokens: int) -> None:
        """The slot's first blocks are those of `source`."""
        for table in self.tables:
            table[slot, : tokens // self._block] = table[source, : tokens // self._block]

    def forward(self, work: list[tuple[int, int, list[int]]]) -> tuple[Rows, dict[Any, Tensor]]:
        """A target forward with the drafter's taps."""
        slots, starts, tokens = zip(*work, strict=True)
        flat = torch.tensor([t for row in tokens for t in row])
        rows = self._rows(list(slots), list(starts), [len(t) for t in tokens], flat)
        with torch.inference_mode():
            return rows, self.model.forward(flat, rows, self.drafter.caps.taps)[1]

    def absorb(self, work: list[tuple[int, int, list[int]]], confirmed: list[int] | None = None) -> None:
        """Forward, and what the executor does once it is verified. `confirmed` of each row's tokens; all."""
        rows, taps = self.forward(work)
        known = torch.tensor([len(t) for _, _, t in work] if confirmed is None else confirmed)
        with torch.inference_mode():
            self.drafter.absorb(rows, taps, known)

    def propose(
        self, work: list[tuple[int, int, int]], limit: int = 0, wrong: int | None = None
    ) -> DeviceDraft:
        """(slot, position, last token) -> drafts; limit 0: as many as the drafter can. `wrong`: draw number
        of which other tokens are returned."""
        slots, positions, tokens = zip(*work, strict=True)
        last = torch.tensor(tokens)
        rows = self._rows(list(slots), list(positions), [1] * len(slots), last)
        many = len(slots)
        self.drawer = _Misleading(
            SpeculationSpec(),
            self.drafter.caps.deterministic,
            np.full(many, 5, np.uint64),
            np.zeros(many, np.uint64),
            np.full(many, self._temperature),
            np.asarray(positions, np.int64),
        )
        self.drawer.wrong = wrong
        with torch.inference_mode():
            return self.drafter.propose(rows, last, limit or self.drafter.caps.max_drafts, self.drawer)

    def drafts(self, slot: int, position: int, token: int) -> list[int]:
        return [int(t) for t in self.propose([(slot, position, token)]).tokens[0]]

    def _rows(self, slots: list[int], starts: list[int], counts: list[int], ids: Tensor) -> Rows:
        none = i32([0] * len(slots))
        return Rows(
            self.pools,
            self.tables,
            i32(slots),
            i32(starts),
            i32(counts),
            none,
            self.kernels,
            _CPU,
            ids=ids,
        )

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.drafter.close()


class _Misleading(RoundDrawer):
    """Draws other tokens at one place, on purpose."""

    wrong: int | None = None
    calls = 0

    def draw(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        found = super().draw(logits, ids)
        self.calls += 1
        if self.calls - 1 != self.wrong:
            return found
        worst = logits.argmin(-1)
        if ids is None:
            return worst
        return ids[worst] if ids.dim() == 1 else ids.gather(1, worst[:, None])[:, 0]


_loaded: dict[Any, tuple[Path, CausalModel, TorchKernels]] = {}
_folders: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends: drafters may read them


def _load(key: Any, suite: Tried) -> tuple[Path, CausalModel, TorchKernels]:
    # Nearly all of a suite's time would go into writing and reading the same toy model.
    if (key, suite.layers) not in _loaded:
        _folders.append(tempfile.TemporaryDirectory())
        with torch.inference_mode():
            folder = suite.target(Path(_folders[-1].name))
            architecture = read_architecture(folder, BLOCK, "float64")
            kernels = TorchKernels()
            parts = ModelParts(_Plain(), Whole(), kernels, torch.float64, _CPU)
            _loaded[key, suite.layers] = folder, load_model(architecture, folder, parts), kernels
    return _loaded[key, suite.layers]


class _Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.out_features = weight, bias, len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class _Plain:
    def matches(self, config: Any) -> bool:
        return True

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> _Linear:
        return _Linear(weight, bias)

    def close(self) -> None:
        pass
