"""Parallel strategy `tensor`: every layer is cut, each rank computes its part of every token.

Shoeybi et al., "Megatron-LM" (2019). Query, key and value projections are cut by attention heads, gate and
up projections by features, so that the products behind them (`o_proj`, `down_proj`) can be cut by input and
summed over ranks: two sums per layer. Embedding and output head, tied or not, are cut by vocabulary. Shares
need not be equal: 3 KV heads on 2 ranks are 1 and 2. Every rank has its part of every expert; routers are
whole, so that all choose alike. With more ranks than KV heads, several hold the same
one and split its query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bien.core.api import (
    Architecture,
    Communicator,
    Context,
    Mesh,
    NoParameters,
    ParallelStrategy,
    PluginFault,
    Point,
    Provider,
    UserError,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

# Whose layers load what `shard` says and sum what they compute from it. A layer that is whole on every rank
# must not be summed, so none is guessed.
CUT = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "gpt_oss", "tiny_hybrid")
# Features stay together in runs as long as there are enough of: groups of weights with one scale fit.
UNITS = (128, 64, 32, 16, 8, 4, 2)


class TensorParallel:
    """See `ParallelStrategy`."""

    def __init__(self, architecture: Architecture) -> None:
        self.rank, self.world = 0, 1
        self._model = architecture
        self._communicator: Communicator | None = None

    def mesh(self, world: int) -> Mesh:
        a = self._model
        if world > 1 and a.name not in CUT:
            raise UserError(
                f"strategy 'tensor' cannot cut models of architecture {a.name!r} ({a.model!r}), only "
                f"{', '.join(CUT)}; valid: devices = 1",
                field="devices",
            )
        if not self._legal(world):
            sizes = [str(n) for n in range(1, a.heads + 1) if self._legal(n)]
            raise UserError(
                f"strategy 'tensor' cannot cut the {a.heads} attention heads ({a.kv_heads} of keys and "
                f"values) of {a.model!r} into {world} parts; valid: devices = {', '.join(sizes)}",
                field="devices",
            )
        return Mesh((("tensor", world),))

    def connect(self, communicator: Communicator) -> None:
        self.mesh(communicator.world)
        self.rank, self.world = communicator.rank, communicator.world
        self._communicator = communicator

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        cuts = [slice(0, n) for n in shape]
        layer, _, kind = name.rpartition(".")
        if kind == "sinks":  # one per query head
            held = self._query_heads()
            cuts[0] = slice(held.start, held.stop)
        match layer.rpartition(".")[2]:
            case "q_proj":
                cuts[0] = self._rows(self._query_heads())
            case "k_proj" | "v_proj":
                cuts[0] = self._rows(self.kv_shard(self._model.kv_heads))
            case "gate_proj" | "up_proj":
                cuts[0] = self._features(shape[0])
            case "o_proj" | "down_proj" if kind == "bias":
                cuts[0] = slice(0, 0 if self.rank else shape[0])  # added once
            case "o_proj":
                cuts[1] = self._rows(self._query_heads())
            case "down_proj":
                cuts[1] = self._features(shape[1])
            case "embed_tokens" | "lm_head":
                part = self._vocabulary_part
                cuts[0] = slice(min(shape[0], self.rank * part), min(shape[0], (self.rank + 1) * part))
        return tuple(cuts)

    def kv_shard(self, heads: int) -> range:
        if heads < self.world:  # several ranks share one
            first = self.rank // (self.world // heads)
            return range(first, first + 1)
        return range(heads * self.rank // self.world, heads * (self.rank + 1) // self.world)

    def collect(self, x: Tensor, point: Point) -> Tensor:
        if self._communicator is None:
            return x
        if point != "logits":
            return self._communicator.sum(x)
        from torch import cat
        from torch.nn.functional import pad

        # The last parts may be shorter, or empty; those that meet must be of one shape.
        parts = self._communicator.gather(pad(x, (0, self._vocabulary_part - x.shape[-1])))
        return cat(parts, -1)[..., : self._model.vocab_size]

    def agree(self, header: int) -> int:
        return header if self._communicator is None else self._communicator.largest(header)

    def close(self) -> None:
        self._communicator = None

    def _legal(self, world: int) -> bool:
        heads, kv_heads = self._model.heads, self._model.kv_heads
        return 1 <= world <= kv_heads or (world % kv_heads == 0 and world >= 1 and heads % world == 0)

    def _query_heads(self) -> range:
        heads, kv_heads = self._model.heads, self._model.kv_heads
        if kv_heads < self.world:
            return range(heads * self.rank // self.world, heads * (self.rank + 1) // self.world)
        held, share = self.kv_shard(kv_heads), heads // kv_heads
        return range(held.start * share, held.stop * share)

    def _rows(self, heads: range) -> slice:
        return slice(heads.start * self._model.head_dim, heads.stop * self._model.head_dim)

    def _features(self, size: int) -> slice:
        fitting = (u for u in UNITS if size % u == 0 and size // u >= self.world)
        unit = next(fitting, 1)
        units = size // unit
        return slice(units * self.rank // self.world * unit, units * (self.rank + 1) // self.world * unit)

    @property
    def _vocabulary_part(self) -> int:
        return -(-self._model.vocab_size // self.world)


def make(config: NoParameters, ctx: Context) -> ParallelStrategy:
    if ctx.architecture is None:
        raise PluginFault("strategy 'tensor' needs the architecture of the model in its context")
    return TensorParallel(ctx.architecture)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "parallel", "tensor", make, summary="every layer cut over the ranks of an engine (gloo, NCCL)"
        )
    ]
