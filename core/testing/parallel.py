"""Conformance of parallel strategies. Subclass `ParallelSuite` with `build()`.

The laws are stated on products, not on layouts: whatever slices a strategy gives its ranks, what they
compute from them must be, after `collect`, the unsharded product, on every rank.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.errors import CollectiveError, UserError
from bien.core.parallel.strategy import ParallelStrategy, Point

T = TypeVar("T")


class ThreadCommunicator:
    """`Communicator` between threads of this process. `of` makes all of a world."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world = rank, len(table)
        self._table, self._barrier = table, barrier

    @classmethod
    def of(cls, world: int, seconds: float = 20.0) -> list[ThreadCommunicator]:
        """One per rank; `seconds` until a peer that does not come is given up."""
        table: list[Any] = [None] * world
        barrier = threading.Barrier(world, timeout=seconds)
        return [cls(rank, table, barrier) for rank in range(world)]

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).sum(0)

    def gather(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = self._swap(x)
        return found

    def largest(self, value: int) -> int:
        return int(max(self._swap(value)))

    def close(self) -> None:
        self._barrier.abort()

    def _swap(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        try:
            self._barrier.wait()
            found = list(self._table)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveError(f"rank {self.rank} cannot reach a peer") from None
        shapes = {(v.shape, v.dtype) for v in found if isinstance(v, Tensor)}
        assert len(shapes) < 2, f"ranks exchange tensors of different shapes: {shapes}"
        return found


HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH, VOCAB = 8, 4, 6, 24, 40, 64
ARCHITECTURE = Architecture(
    name="llama",
    model="toy",
    layers=1,
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    max_context=64,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
)
_LAYER = "model.layers.0."
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q, K, V, O = (f"{_LAYER}self_attn.{p}_proj.weight" for p in "qkvo")  # noqa: E741
GATE, UP, DOWN = (f"{_LAYER}mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
NORM = _LAYER + "input_layernorm.weight"
SHAPES = {
    EMBED: (VOCAB, HIDDEN),
    Q: (HEADS * HEAD_DIM, HIDDEN),
    K: (KV_HEADS * HEAD_DIM, HIDDEN),
    V: (KV_HEADS * HEAD_DIM, HIDDEN),
    O: (HIDDEN, HEADS * HEAD_DIM),
    GATE: (WIDTH, HIDDEN),
    UP: (WIDTH, HIDDEN),
    DOWN: (HIDDEN, WIDTH),
    NORM: (HIDDEN,),
    HEAD: (VOCAB, HIDDEN),
}


class ParallelSuite:
    """`worlds` are the sizes to test, `illegal` sizes that `mesh` must refuse. The shapes of the toy model
    (`ARCHITECTURE`) divide by 1, 2 and 4."""

    worlds: tuple[int, ...] = (1,)
    illegal: tuple[int, ...] = (0,)
    timeout = 20.0  # seconds until a collective that does not return is a failure

    def build(self, rank: int, world: int) -> ParallelStrategy:
        """The strategy of one rank, connected (`ThreadCommunicator.of(world)`). Ranks of one world are built
        one after the other, rank 0 first, and then called at the same time, each from a thread of its own;
        all live in this process."""
        raise NotImplementedError

    def test_mesh_holds_every_rank(self) -> None:
        for world, ranks in self._worlds():
            for rank, strategy in enumerate(ranks):
                mesh = strategy.mesh(world)
                assert mesh.world == world, f"the mesh for {world} ranks holds {mesh.world}"
                assert strategy.rank == rank

    def test_illegal_worlds_are_refused(self) -> None:
        strategy = self.build(0, self.worlds[0])
        for world in self.illegal:
            try:
                strategy.mesh(world)
            except UserError:
                continue
            raise AssertionError(f"a mesh for {world} ranks must raise UserError")

    def test_shards_tile_every_parameter(self) -> None:
        """Each parameter is whole on every rank, or cut along one axis into parts that neither overlap
        nor leave anything out, in rank order."""
        for world, ranks in self._worlds():
            for name, shape in SHAPES.items():
                cuts = [_ranges(s.shard(name, shape), shape) for s in ranks]
                full = tuple(range(n) for n in shape)
                if all(cut == full for cut in cuts):
                    continue
                axes = {i for cut in cuts for i, r in enumerate(cut) if r != full[i]}
                assert len(axes) == 1, f"{name} is cut along axes {sorted(axes)} in a world of {world}"
                axis = axes.pop()
                held = [i for cut in cuts for i in cut[axis]]
                assert held == list(full[axis]), f"{name}, world {world}: shards hold {held} of axis {axis}"

    def test_attention_shards_fit_the_kv_heads(self) -> None:
        for world, ranks in self._worlds():
            held = [s.kv_shard(KV_HEADS) for s in ranks]
            assert {h for r in held for h in r} == set(range(KV_HEADS)), f"KV heads of {world} ranks: {held}"
            for strategy, heads in zip(ranks, held, strict=True):
                for name, per in ((K, 1), (V, 1), (Q, HEADS // KV_HEADS)):
                    rows = _ranges(strategy.shard(name, SHAPES[name]), SHAPES[name])[0]
                    size = per * HEAD_DIM
                    assert rows == range(heads.start * size, heads.stop * size), f"{name} holds {rows}"

    def test_attention_out(self) -> None:
        def part(s: ParallelStrategy, weights: dict[str, Tensor], x: Tensor) -> Tensor:
            q, o = (_cut(s, name, weights) for name in (Q, O))
            return (x @ q.T) @ o.T

        self._law("attention_out", part, lambda w, x: (x @ w[Q].T) @ w[O].T)

    def test_mlp_out(self) -> None:
        def part(s: ParallelStrategy, weights: dict[str, Tensor], x: Tensor) -> Tensor:
            gate, up, down = (_cut(s, name, weights) for name in (GATE, UP, DOWN))
            return ((x @ gate.T) * (x @ up.T)) @ down.T

        self._law("mlp_out", part, lambda w, x: ((x @ w[GATE].T) * (x @ w[UP].T)) @ w[DOWN].T)

    def test_logits(self) -> None:
        self._law("logits", lambda s, w, x: x @ _cut(s, HEAD, w).T, lambda w, x: x @ w[HEAD].T)

    def test_embed(self) -> None:
        tokens = torch.tensor([0, VOCAB - 1, 7, 33, 7])

        def part(s: ParallelStrategy, weights: dict[str, Tensor], x: Tensor) -> Tensor:
            rows, _ = _ranges(s.shard(EMBED, SHAPES[EMBED]), SHAPES[EMBED])
            mine = (tokens >= rows.start) & (tokens < rows.stop)
            local = torch.where(mine, tokens - rows.start, 0)
            return _cut(s, EMBED, weights)[local] * mine[:, None]

        self._law("embed", part, lambda w, x: w[EMBED][tokens])

    def test_collect_of_an_empty_batch(self) -> None:
        """Idle ranks run a dummy batch; a batch of no rows must not upset a collective."""
        for world, ranks in self._worlds():
            found = self._together(ranks, lambda s: s.collect(torch.zeros(0, HIDDEN), "mlp_out"))
            assert all(x.shape == (0, HIDDEN) for x in found), f"world {world}"

    def test_agree_on_the_largest_header(self) -> None:
        for world, ranks in self._worlds():
            for headers in (
                [0] * world,
                list(range(world)),
                list(range(world, 0, -1)),
                [0] * (world - 1) + [9],
            ):
                found = self._together(ranks, lambda s, h=headers: s.agree(h[s.rank]))  # type: ignore[misc]
                assert found == [max(headers)] * world, f"headers {headers}: ranks see {found}"

    def test_close(self) -> None:
        for _, ranks in self._worlds():
            for strategy in ranks:
                strategy.close()

    def _worlds(self) -> list[tuple[int, list[ParallelStrategy]]]:
        return [(world, [self.build(rank, world) for rank in range(world)]) for world in self.worlds]

    def _law(
        self,
        point: Point,
        part: Callable[[ParallelStrategy, dict[str, Tensor], Tensor], Tensor],
        whole: Callable[[dict[str, Tensor], Tensor], Tensor],
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        weights = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
        x = torch.randn(5, HIDDEN, generator=generator, dtype=torch.float64)
        exact = whole(weights, x)
        for world, ranks in self._worlds():
            found = self._together(ranks, lambda s: s.collect(part(s, weights, x), point))
            for rank, y in enumerate(found):
                where = f"{point}, rank {rank} of {world}"
                assert y.shape == exact.shape, f"{where}: {tuple(y.shape)} instead of {tuple(exact.shape)}"
                assert torch.allclose(y, exact, rtol=1e-9, atol=1e-9), f"{where}: not the unsharded product"

    def _together(self, ranks: list[ParallelStrategy], work: Callable[[ParallelStrategy], T]) -> list[T]:
        if len(ranks) == 1:
            return [work(ranks[0])]

        async def run() -> list[Any]:
            calls = asyncio.gather(*(asyncio.to_thread(work, s) for s in ranks))
            return await asyncio.wait_for(calls, self.timeout)

        return asyncio.run(run())


def _ranges(slices: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[range, ...]:
    assert len(slices) == len(shape), f"{len(slices)} slices for a parameter of {len(shape)} axes"
    return tuple(range(*s.indices(n)) for s, n in zip(slices, shape, strict=True))


def _cut(strategy: ParallelStrategy, name: str, weights: dict[str, Tensor]) -> Tensor:
    return weights[name][strategy.shard(name, SHAPES[name])]
