"""`PagedBatch`: a step over a small paged pool, made by hand, and attention over it by the formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bien.core.executors.pools import DTYPES, Pool
from bien.core.executors.rows import GroupRows
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.plan import i32

CPU = torch.device("cpu")
LAYERS = 2


class PagedBatch:
    """Sequences of given (start, count), each over blocks of its own. What no row may look at is full of
    `garbage`: the null block, foreign blocks, everything behind a row's end. Blocks that lie wholly before
    the window of a row are not in its table, as the cache drops them."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        *,
        kv_heads: int = 2,
        share: int = 3,
        d: int = 32,
        block: int = 4,
        window: int = 0,
        order: str = "random",
        dtype: str = "float32",
        garbage: float = 1e30,
    ) -> None:
        """`order` of the blocks in the pool: "random", "ascending", or "halves" (each row in two runs)."""
        self.spans, self.block, self.window, self.kv_heads, self.share = spans, block, window, kv_heads, share
        self.heads, self.d, width = kv_heads * share, d, 2 * kv_heads * d
        needs = [-(-(start + count) // block) for start, count in spans]
        total = sum(needs) + 3
        item = DTYPES[dtype].itemsize
        group = KVGroup(
            "kv",
            GroupKind.WINDOW if window else GroupKind.FULL,
            tuple(range(LAYERS)),
            block,
            bytes_per_token=LAYERS * width * item,
            window=window,
            dtype=dtype,
        )
        self.pool = Pool.allocate(group, total, CPU)
        self.pool.data.fill_(garbage)
        self.pool.data[:, ::2] *= -1
        self.table = self._table(needs, total, order)
        # A sequence's content depends on its span alone, so that batches can be compared row by row.
        self.kv = [_normal(f"kv {span}", LAYERS, sum(span), width, dtype=dtype) for span in spans]
        for i, content in enumerate(self.kv):
            self.put(i, content)
        queries = [_normal(f"query {span}", span[1], self.heads, d, dtype=dtype) for span in spans]
        self.query = torch.cat(queries)
        self.counts = i32([count for _, count in spans])
        self.offsets = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def rows(self, skip: int = 0) -> GroupRows:
        """A step's view, with nothing derived from it yet."""
        starts = i32([start for start, _ in self.spans])
        return GroupRows(self.pool, self.table.copy(), starts, self.counts, self.offsets, CPU, skip)

    @property
    def size(self) -> int:
        """N"""
        return int(self.offsets[-1])

    def put(self, i: int, content: Tensor) -> None:
        """Sequence i holds [layers, positions, width] from now on."""
        self.kv[i] = content
        start, count = self.spans[i]
        seen = np.arange(self._first(start) // self.block * self.block, start + count)
        for layer in range(LAYERS):
            self.pool.flat[layer][self.entries(i, seen)] = content[layer, torch.from_numpy(seen)]

    def entries(self, i: int, positions: Any) -> Tensor:
        """Where positions of sequence i lie in `pool.flat`."""
        blocks = self.table[i, positions // self.block].astype(np.int64)
        return torch.from_numpy(blocks * self.block + positions % self.block)

    def new_kv(self, layer: int) -> Tensor:
        """[N, width]: what the step's tokens hold, in flat order."""
        return torch.cat([kv[layer, start:] for kv, (start, _) in zip(self.kv, self.spans, strict=True)])

    def tokens(self) -> Iterator[tuple[int, int, int]]:
        """(flat index, sequence, position) of every token."""
        for i, (start, count) in enumerate(self.spans):
            for j in range(count):
                yield int(self.offsets[i]) + j, i, start + j

    def part(self, out: Tensor, i: int) -> Tensor:
        """The tokens of sequence i of something flat."""
        return out[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def exact(self, layer: int, scale: float, sinks: Tensor | None = None, skip: int = 0) -> Tensor:
        """[N, heads * d] float64, by the formula. `skip`: positions below it have no entries."""
        out = []
        for i, (start, count) in enumerate(self.spans):
            kv = self.kv[i][layer].double().view(-1, 2, self.kv_heads, self.d)
            key, value = (kv[:, j].repeat_interleave(self.share, 1) for j in (0, 1))  # [L, heads, d]
            scores = torch.einsum("chd,lhd->hcl", self.part(self.query, i).double() * scale, key)
            position, at = torch.arange(start, start + count)[:, None], torch.arange(start + count)
            hidden = at > position
            if self.window:
                hidden |= at <= position - self.window
            hidden |= at < skip
            scores.masked_fill_(hidden, float("-inf"))
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                own = sinks.double()[:, None, None].expand(-1, count, 1)
                weights = torch.cat([scores, own], -1).softmax(-1)[..., :-1]
            weights = weights.masked_fill(hidden, 0)  # who sees nothing gets zeros
            out.append(torch.einsum("hcl,lhd->chd", weights, value).reshape(count, -1))
        return torch.cat(out)

    def _first(self, start: int) -> int:
        return max(0, start - self.window + 1) if self.window else 0

    def _table(self, needs: list[int], total: int, order: str) -> Any:
        blocks = np.arange(1, total + 1)
        if order == "random":
            np.random.default_rng(total).shuffle(blocks)
        elif order == "halves":
            blocks = np.concatenate([blocks[total // 2 :], blocks[: total // 2]])
        table = np.zeros((len(needs), max(needs) + 2), np.int32)
        at = 0
        for i, n in enumerate(needs):
            dropped = self._first(self.spans[i][0]) // self.block
            own = blocks[at : at + n]
            if order == "halves":
                own = np.concatenate([own[n // 2 :], own[: n // 2]])
            table[i, dropped:n] = own[dropped:]
            at += n
        return table


def _normal(name: str, *shape: int, dtype: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + len(name))
    return torch.randn(shape, generator=generator).to(DTYPES[dtype])
