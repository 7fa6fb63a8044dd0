from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from bien.core.errors import UserError
from bien.core.parallel.strategy import Mesh
from bien.core.testing.parallel import ParallelSuite
from bien.core.testing.suites import failures
from bien.plugins.parallel.single import Single

FULL = slice(None)


class Exchange:
    """An all-gather between the threads of one world."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=5)
        self.slots: list[Any] = [None] * world

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class Tensors:
    """Tensor parallelism as it should be: columns, rows, and the vocabulary."""

    def __init__(self, rank: int, world: int, exchange: Exchange) -> None:
        self.rank, self.world, self.exchange = rank, world, exchange

    def mesh(self, world: int) -> Mesh:
        if world < 1 or world & (world - 1):
            raise UserError(f"{world} ranks: valid sizes are powers of two")
        return Mesh((("tensor", world),))

    def share(self, size: int) -> slice:
        part = size // self.world
        return slice(self.rank * part, (self.rank + 1) * part)

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        if "norm" in name:
            return (FULL,) * len(shape)
        if "o_proj" in name or "down_proj" in name:
            return FULL, self.share(shape[1])
        return self.share(shape[0]), FULL

    def kv_shard(self, heads: int) -> range:
        return range(heads)[self.share(heads)]

    def collect(self, x: Tensor, point: str) -> Tensor:
        parts = self.exchange.gather(self.rank, x)
        return torch.cat(parts, -1) if point == "logits" else torch.stack(parts).sum(0)

    def agree(self, header: int) -> int:
        return int(max(self.exchange.gather(self.rank, header)))

    def close(self) -> None:
        pass


class Replicated(Tensors):
    """Every rank holds everything and computes the same."""

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return (FULL,) * len(shape)

    def kv_shard(self, heads: int) -> range:
        return range(heads)

    def collect(self, x: Tensor, point: str) -> Tensor:
        return x


class Overlaps(Tensors):
    def share(self, size: int) -> slice:
        part = size // self.world
        return slice(self.rank * part, min(size, (self.rank + 1) * part + 1))


class LeavesOut(Tensors):
    def share(self, size: int) -> slice:
        part = size // self.world
        return slice(self.rank * part, (self.rank + 1) * part - (self.rank == self.world - 1))


class SwapsRanks(Tensors):
    """The vocabulary lies in reverse rank order: `logits` come out permuted."""

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        rank = self.world - 1 - self.rank if "lm_head" in name else self.rank
        return Tensors(rank, self.world, self.exchange).shard(name, shape)


class Doubles(Replicated):
    """Sums what every rank has computed in full."""

    def collect(self, x: Tensor, point: str) -> Tensor:
        return Tensors.collect(self, x, point)


class ForgetsTheMlp(Tensors):
    def collect(self, x: Tensor, point: str) -> Tensor:
        return x if point == "mlp_out" else super().collect(x, point)


class KeepsLogitsApart(Tensors):
    def collect(self, x: Tensor, point: str) -> Tensor:
        return x if point == "logits" else super().collect(x, point)


class AgreesAlone(Tensors):
    def agree(self, header: int) -> int:
        return header


class WrongKvHeads(Tensors):
    def kv_shard(self, heads: int) -> range:
        return range(heads)


class TakesAnyWorld(Tensors):
    def mesh(self, world: int) -> Mesh:
        return Mesh((("tensor", world),))


class SmallMesh(Tensors):
    def mesh(self, world: int) -> Mesh:
        super().mesh(world)
        return Mesh()


CAUGHT = {
    Overlaps: "shards_tile_every_parameter",
    LeavesOut: "shards_tile_every_parameter",
    SwapsRanks: "logits",
    Doubles: "mlp_out",
    ForgetsTheMlp: "mlp_out",
    KeepsLogitsApart: "logits",
    AgreesAlone: "agree_on_the_largest_header",
    WrongKvHeads: "attention_shards_fit_the_kv_heads",
    TakesAnyWorld: "illegal_worlds_are_refused",
    SmallMesh: "mesh_holds_every_rank",
}


def suite(strategy: type[Tensors]) -> type[ParallelSuite]:
    class Suite(ParallelSuite):
        worlds = (1, 2, 4)
        illegal = (0, 3)

        def build(self, rank: int, world: int) -> Tensors:
            if rank == 0:
                self.exchange = Exchange(world)
            return strategy(rank, world, self.exchange)

    return Suite


@pytest.mark.parametrize("strategy", [Tensors, Replicated], ids=lambda c: c.__name__)
def test_plain_strategies_conform(strategy: type[Tensors]) -> None:
    assert failures(suite(strategy)) == []


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda c: c.__name__)
def test_fault_is_caught(fault: type[Tensors]) -> None:
    names = [line.split(":")[0] for line in failures(suite(fault))]
    assert f"test_{CAUGHT[fault]}" in names


class TestSingle(ParallelSuite):
    illegal = (0, 2)

    def build(self, rank: int, world: int) -> Single:
        return Single()
