"""Conformance of device speculators. Subclass `DeviceSpeculatorSuite` with `build()`.

The suite plays the executor: a toy model of the Llama shape (or the folder that `target` names), pools
whose unwritten entries hold garbage, ragged batches, chunks, rejected drafts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.architectures.registry import read_architecture
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.kv.groups import GroupKind
from bien.core.models.registry import CausalModel, ModelParts, load_model
from bien.core.plan import i32
from bien.core.speculation.speculator import DeviceSpeculator
from bien.core.testing.speculator import check_caps
from bien.core.testing.toy import write_toy

BLOCK, SLOTS, LENGTH = 4, 4, 64
_CPU = torch.device("cpu")


class DeviceSpeculatorSuite:
    """Drafts are compared token for token, in float64. A drafter with caps.deterministic = False is held
    to shapes, groups and isolation of the target only."""

    layers = 4  # of the toy target

    def build(self) -> DeviceSpeculator:
        """A fresh drafter, not loaded."""
        raise NotImplementedError

    def target(self, folder: Path) -> Path:
        """A model folder that the drafter can use, written into `folder`. Its attention is loud, so that
        drafts tell what was in the KV blocks."""
        write_toy(folder, num_hidden_layers=self.layers, tie_word_embeddings=False)
        tensors = load_file(folder / "model.safetensors")
        for name in tensors:
            if name.endswith("o_proj.weight"):
                tensors[name] *= 8
        save_file(tensors, folder / "model.safetensors")
        return folder

    def test_caps(self) -> None:
        caps = self.build().caps
        check_caps(caps, "device")
        for layer, side in caps.taps:
            assert 0 <= layer < self.layers, f"tap of layer {layer}; the target has {self.layers}"
            assert side in ("in", "out"), f"tap side {side!r}; valid: in, out"

    def test_groups_are_drafters_groups(self) -> None:
        with self._bench() as bench:
            own = bench.drafter.groups(bench.architecture, BLOCK)
            taken = {g.name for g in bench.architecture.groups}
            for group in own:
                assert group.kind is GroupKind.DRAFT, f"group {group.name!r} is {group.kind.value}, not draft"
                assert group.block_tokens == BLOCK, (
                    f"blocks of {group.block_tokens} tokens, {BLOCK} were asked for"
                )
                assert group.name not in taken, f"two groups are called {group.name!r}"
                assert group.bytes_per_token > 0 and group.layers, f"group {group.name!r} holds nothing"
                taken.add(group.name)
            assert own == self.build().groups(bench.architecture, BLOCK), "another instance has other groups"

    def test_shape_and_range(self) -> None:
        with self._bench() as bench:
            most = bench.drafter.caps.max_drafts
            for limit in range(1, most + 1):
                bench.clear()
                for slot in (2, 0):
                    bench.absorb([(slot, 0, _text(slot, 9))])
                drafts = bench.propose([(2, 9, 5), (0, 9, 7)], limit)
                assert tuple(drafts.shape) == (2, limit), f"limit {limit}: shape {tuple(drafts.shape)}"
                assert not drafts.is_floating_point(), f"drafts are {drafts.dtype}"
                size = bench.architecture.vocab_size
                assert bool(((drafts >= 0) & (drafts < size)).all()), f"drafts outside 0..{size - 1}"

    def test_deterministic_as_declared(self) -> None:
        if not self.build().caps.deterministic:
            return
        found = []
        for _ in range(2):
            with self._bench() as bench:
                bench.absorb([(1, 0, _text(1, 20))])
                found.append([bench.drafts(1, 20, 3) for _ in range(2)])
        assert found[0][0] == found[0][1], "proposing again gives other drafts"
        assert found[0] == found[1], "another instance gives other drafts"

    def test_chunks_do_not_matter(self) -> None:
        def chunked(bench: Bench, sizes: list[int]) -> list[int]:
            at, text = 0, _text(3, 23)
            for n in sizes:
                bench.absorb([(1, at, text[at : at + n])])
                at += n
            return bench.drafts(1, 23, 9)

        self._same([lambda b, s=s: chunked(b, s) for s in ([23], [7, 16], [1] * 23, [20, 2, 1])])

    def test_company_does_not_matter(self) -> None:
        texts = {0: _text(10, 17), 1: _text(11, 5), 3: _text(12, 30)}

        def alone(bench: Bench) -> list[list[int]]:
            for slot, text in texts.items():
                bench.absorb([(slot, 0, text)])
            return [bench.drafts(slot, len(text), slot + 4) for slot, text in texts.items()]

        def together(bench: Bench) -> list[list[int]]:
            bench.absorb([(3, 0, texts[3][:8]), (1, 0, texts[1])])
            bench.absorb([(0, 0, texts[0]), (3, 8, texts[3][8:])])
            out = bench.propose([(slot, len(text), slot + 4) for slot, text in reversed(texts.items())])
            return out.tolist()[::-1]

        self._same([alone, together])

    def test_rejected_drafts_leave_nothing(self) -> None:
        """A round proposes, its drafts are rejected: the row's later positions come again, with others."""
        text = _text(20, 30)

        def straight(bench: Bench) -> list[int]:
            bench.absorb([(2, 0, text)])
            return bench.drafts(2, 30, 8)

        def rejected(bench: Bench) -> list[int]:
            bench.absorb([(2, 0, text[:12])])
            at = 12
            while at < 30:
                bench.drafts(2, at, text[at])
                wrong = [(t + 1) % 288 for t in text[at + 1 : at + 4]]
                bench.absorb([(2, at, [text[at], *wrong])])
                at += 1
            return bench.drafts(2, 30, 8)

        def accepted(bench: Bench) -> list[int]:
            bench.absorb([(2, 0, text[:12])])
            for at in range(12, 30, 3):
                bench.drafts(2, at, text[at])
                bench.absorb([(2, at, text[at : at + 3])])
            return bench.drafts(2, 30, 8)

        self._same([straight, rejected, accepted])

    def test_a_prefix_in_the_blocks_is_enough(self) -> None:
        """A prefix hit: another slot, whose blocks hold the prefix, sees forwards of the tail only."""
        text = _text(30, 22)

        def whole(bench: Bench) -> list[int]:
            bench.absorb([(0, 0, text)])
            return bench.drafts(0, 22, 6)

        def shared(bench: Bench) -> list[int]:
            bench.absorb([(3, 0, text[:16])])
            bench.share(3, 0, 16)
            bench.absorb([(0, 16, text[16:])])
            return bench.drafts(0, 22, 6)

        self._same([whole, shared])

    def test_a_slot_is_used_again(self) -> None:
        def fresh(bench: Bench) -> list[int]:
            bench.absorb([(1, 0, _text(41, 11))])
            return bench.drafts(1, 11, 2)

        def used(bench: Bench) -> list[int]:
            bench.absorb([(1, 0, _text(40, 40))])
            bench.drafts(1, 40, 2)
            return fresh(bench)

        self._same([fresh, used])

    def test_reads_no_position_that_was_not_written(self) -> None:
        """Entries that nobody wrote hold other garbage in each run."""

        def run(bench: Bench) -> list[int]:
            bench.absorb([(1, 0, _text(50, 13))])
            return bench.drafts(1, 13, 2)

        self._same([run, run], garbage=True)

    def test_leaves_the_target_alone(self) -> None:
        """The target's pools, and the states that were tapped, belong to the target."""
        with self._bench() as bench:
            rows, taps = bench.forward([(1, 0, _text(60, 18))])
            before = {tap: x.clone() for tap, x in taps.items()}
            pools = [p.data.clone() for p in bench.pools[: len(bench.architecture.groups)]]
            with torch.inference_mode():
                bench.drafter.absorb(rows, taps)
            bench.drafts(1, 18, 3)
            for tap, x in taps.items():
                assert torch.equal(x, before[tap]), f"absorb changed the hidden state at {tap}"
            for pool, data in zip(bench.pools, pools, strict=False):
                assert torch.equal(pool.data, data), f"the target's group {pool.group.name!r} was written"

    def _same(self, ways: list[Any], garbage: bool = False) -> None:
        if not self.build().caps.deterministic:
            return
        found = []
        for i, way in enumerate(ways):
            with self._bench(garbage=i if garbage else 0) as bench:
                found.append(way(bench))
        for i, other in enumerate(found[1:], 1):
            assert other == found[0], f"way {i}: {other}, way 0: {found[0]}"

    def _bench(self, garbage: int = 0) -> Bench:
        return Bench(self, garbage)


class Bench:
    """Target, drafter and pools; a work item is (slot, start, tokens)."""

    def __init__(self, suite: DeviceSpeculatorSuite, garbage: int) -> None:
        self.architecture, self.model, self.kernels = _load(type(suite).target, suite)
        self.drafter = suite.build()
        own = self.drafter.groups(self.architecture, BLOCK)
        self.groups = (*self.architecture.groups, *own)
        self.drafter.load(self.model, tuple(range(len(self.architecture.groups), len(self.groups))))
        self._garbage = garbage
        self.clear()

    def clear(self) -> None:
        """Pools as new; a slot owns the blocks of a random order."""
        rng = np.random.default_rng(9)
        each = LENGTH // BLOCK
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
            table[slot, : tokens // BLOCK] = table[source, : tokens // BLOCK]

    def forward(self, work: list[tuple[int, int, list[int]]]) -> tuple[Rows, dict[Any, Tensor]]:
        """A target forward with the drafter's taps."""
        slots, starts, tokens = zip(*work, strict=True)
        rows = self._rows(list(slots), list(starts), [len(t) for t in tokens])
        with torch.inference_mode():
            flat = torch.tensor([t for row in tokens for t in row])
            return rows, self.model.forward(flat, rows, self.drafter.caps.taps)[1]

    def absorb(self, work: list[tuple[int, int, list[int]]]) -> None:
        """Forward, and what the executor does after it."""
        rows, taps = self.forward(work)
        with torch.inference_mode():
            self.drafter.absorb(rows, taps)

    def propose(self, work: list[tuple[int, int, int]], limit: int = 0) -> Tensor:
        """(slot, position, last token) -> drafts [rows, limit]; 0: as many as the drafter can."""
        slots, positions, tokens = zip(*work, strict=True)
        rows = self._rows(list(slots), list(positions), [1] * len(slots))
        with torch.inference_mode():
            return self.drafter.propose(rows, torch.tensor(tokens), limit or self.drafter.caps.max_drafts)

    def drafts(self, slot: int, position: int, token: int) -> list[int]:
        return [int(t) for t in self.propose([(slot, position, token)])[0]]

    def _rows(self, slots: list[int], starts: list[int], counts: list[int]) -> Rows:
        none = i32([0] * len(slots))
        return Rows(self.pools, self.tables, i32(slots), i32(starts), i32(counts), none, self.kernels, _CPU)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.drafter.close()


_loaded: dict[Any, tuple[Architecture, CausalModel, TorchKernels]] = {}


def _load(key: Any, suite: DeviceSpeculatorSuite) -> tuple[Architecture, CausalModel, TorchKernels]:
    # Nearly all of a suite's time would go into writing and reading the same toy model.
    if (key, suite.layers) not in _loaded:
        with tempfile.TemporaryDirectory() as name, torch.inference_mode():
            folder = suite.target(Path(name))
            architecture = read_architecture(folder, BLOCK, "float64")
            kernels = TorchKernels()
            parts = ModelParts(_Plain(), _Alone(), kernels, torch.float64, _CPU)
            _loaded[key, suite.layers] = architecture, load_model(architecture, folder, parts), kernels
    return _loaded[key, suite.layers]


def _text(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, length)]


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


class _Alone:
    rank = 0

    def mesh(self, world: int) -> Any:
        raise NotImplementedError

    def connect(self, communicator: Any) -> None:
        raise NotImplementedError

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return (slice(None),) * len(shape)

    def kv_shard(self, heads: int) -> range:
        return range(heads)

    def collect(self, x: Tensor, point: str) -> Tensor:
        return x

    def agree(self, header: int) -> int:
        return header

    def close(self) -> None:
        pass
