"""How the torch kernel runs paged attention: a step's rows as a few dense products.

A row whose blocks lie in one or a few runs in the pool is read in place, if it is long or computes many
tokens. The others are gathered, rows of like length together, into a scratch buffer that stays in the
processor's cache. Masks and indices are built once per step for all layers of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bien.core.executors.rows import GroupRows

VIEW_TOKENS = 768  # shorter rows are cheaper gathered together than called one by one
RUN_TOKENS = 128  # a row is read in place if its runs have so many tokens on average
CHUNK_TOKENS = 16  # rows that compute at least so many tokens run alone
SCRATCH_BYTES = 2 << 20  # per gathered bucket: about one core's second-level cache
SLACK = 1.25  # a bucket's longest row may have so many times the blocks of its shortest


class Scratch:
    """One buffer for gathered blocks, used again by every segment and layer."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, like: Tensor, blocks: int) -> Tensor:
        """[blocks, *like.shape[1:]] of undefined content."""
        need = blocks * like[0].numel()
        buffer = self._buffer
        if buffer.numel() < need or buffer.dtype != like.dtype or buffer.device != like.device:
            self._buffer = torch.empty(need, dtype=like.dtype, device=like.device)
        return self._buffer[:need].view(blocks, *like.shape[1:])


@dataclass(slots=True)
class Gathered:
    """Blocks that are copied into the scratch buffer, and how they look there."""

    blocks: Tensor  # [R * blocks] int64
    into: Tensor  # [R * blocks, block_tokens, width]
    key: Tensor  # [R, kv_heads, L, d], a view of `into`
    value: Tensor


@dataclass(slots=True)
class Segment:
    """Rows computed by one dense product: R sequences of C tokens over L pool entries."""

    query: slice | Tensor | None  # which flat tokens; None: all
    sequences: int  # R
    count: int  # C
    entries: list[tuple[int, int]] | Gathered  # runs (first, length) of flat entries, read in place (R = 1)
    # Additive: [C, L] of a chunk, [R, 1, 1, L], or [R, 1, C * query heads per KV head, L].
    mask: Tensor | None
    causal: bool  # a chunk from position 0: the top-left causal mask of the product itself


def plan_attention(
    rows: GroupRows, kv_heads: int, share: int, dtype: torch.dtype, scratch: Scratch
) -> list[Segment]:
    """Segments of a step; `share` = query heads per KV head."""
    return _Planner(rows, kv_heads, share, dtype, scratch).plan()


class _Planner:
    def __init__(
        self, rows: GroupRows, kv_heads: int, share: int, dtype: torch.dtype, scratch: Scratch
    ) -> None:
        self.rows, self.kv_heads, self.share, self.dtype, self.scratch = rows, kv_heads, share, dtype, scratch
        self.size = rows.block_tokens
        first = np.maximum(rows.starts - rows.window + 1, 0) // self.size if rows.window else 0
        self.first = np.zeros_like(rows.starts) + first  # block that a row's window begins in
        self.blocks = -(-(rows.starts + rows.counts) // self.size) - self.first

    def plan(self) -> list[Segment]:
        alone: list[int] = []
        gathered: list[int] = []
        counts = self.rows.counts.tolist()
        for i, (count, n) in enumerate(zip(counts, self.blocks.tolist(), strict=True)):
            single = count >= CHUNK_TOKENS or n * self.size >= VIEW_TOKENS or len(counts) == 1
            (alone if single else gathered).append(i)
        segments = [self.single(i) for i in alone]
        segments += [self.bucket(b) for b in self.buckets(gathered)]
        if len(segments) == 1 and type(segments[0].query) is slice:
            segments[0].query = None
        return segments

    def single(self, i: int) -> Segment:
        rows = self.rows
        first, start, count = int(self.first[i]), int(rows.starts[i]), int(rows.counts[i])
        used = rows.table[i, first : first + int(self.blocks[i])]
        begin = first * self.size
        length = start + count - begin
        breaks = np.flatnonzero(used[1:] - used[:-1] != 1) + 1
        entries: list[tuple[int, int]] | Gathered
        if len(breaks) == 0 or (count < CHUNK_TOKENS and (len(breaks) + 1) * RUN_TOKENS <= length):
            edges = [0, *breaks.tolist(), len(used)]
            entries = [
                (int(used[a]) * self.size, min(b * self.size, length) - a * self.size)
                for a, b in pairwise(edges)
            ]
        else:
            entries = self.gather(used[None], length)
        masked = rows.skip > begin  # positions that nobody may see are among the entries
        causal = count >= CHUNK_TOKENS and start == 0 and not 0 < rows.window < count and not masked
        mask = None
        # One token sees every entry from its window's first block on, but those before the window.
        if not causal and (count > 1 or masked or (rows.window and start - rows.window >= begin)):
            position = torch.arange(start, start + count, device=rows.device)[:, None]
            key = torch.arange(begin, begin + length, device=rows.device)
            mask = _mask(position, key, rows, self.dtype)
            if count < CHUNK_TOKENS:
                mask = mask.repeat_interleave(self.share, 0)
        query = slice(int(rows.offsets[i]), int(rows.offsets[i + 1]))
        return Segment(query, 1, count, entries, mask, causal)

    def gather(self, blocks: NDArray[np.int32], length: int) -> Gathered:
        # blocks: [R, most], each row's in order.
        pool = self.rows.pool.layers[0]
        index = torch.from_numpy(blocks.astype(np.int64).reshape(-1)).to(self.rows.device)
        into = self.scratch.take(pool, len(index))
        entries = into.view(len(blocks), -1, 2, self.kv_heads, pool.shape[-1] // (2 * self.kv_heads))
        key, value = entries[:, :length].permute(2, 0, 3, 1, 4).unbind(0)
        return Gathered(index, into, key, value)

    def buckets(self, members: list[int]) -> list[list[int]]:
        # Same token count, like block counts, and no more than the scratch buffer takes.
        counts, blocks = self.rows.counts.tolist(), self.blocks.tolist()
        block_bytes = self.rows.pool.layers[0][0].nbytes
        buckets: list[list[int]] = []
        for i in sorted(members, key=lambda i: (counts[i], blocks[i], i)):
            last = buckets[-1] if buckets else []
            if (
                last
                and counts[last[0]] == counts[i]
                and blocks[i] <= SLACK * blocks[last[0]] + 1
                and (len(last) + 1) * blocks[i] * block_bytes <= SCRATCH_BYTES
            ):
                last.append(i)
            else:
                buckets.append([i])
        return [sorted(b) for b in buckets]

    def bucket(self, members: list[int]) -> Segment:
        rows, device = self.rows, self.rows.device
        index = np.asarray(members)
        count, most = int(rows.counts[members[0]]), int(self.blocks[index].max())
        # Columns past a row's own blocks read whatever block comes there: the mask hides them.
        column = np.minimum(self.first[index][:, None] + np.arange(most), rows.table.shape[1] - 1)
        gathered = self.gather(rows.table[index[:, None], column], most * self.size)
        query: slice | Tensor
        if members[-1] - members[0] + 1 == len(members):
            query = slice(int(rows.offsets[members[0]]), int(rows.offsets[members[-1] + 1]))
        else:
            token = rows.offsets[index][:, None] + np.arange(count)
            query = torch.from_numpy(token.reshape(-1)).to(device)
        begin = self.first[index].astype(np.int64) * self.size
        start = rows.starts[index].astype(np.int64)
        mask = None
        if count > 1 or rows.window or rows.skip or bool((start - begin + 1 != most * self.size).any()):
            position = torch.from_numpy(start[:, None] + np.arange(count)).to(device)[:, :, None]
            key = torch.from_numpy(begin[:, None] + np.arange(most * self.size)).to(device)[:, None]
            mask = _mask(position, key, rows, self.dtype)[:, None]
            if count > 1:
                mask = mask.repeat_interleave(self.share, 2)
        return Segment(query, len(members), count, gathered, mask, False)


def _mask(position: Tensor, key: Tensor, rows: GroupRows, dtype: torch.dtype) -> Tensor:
    hidden = key > position
    if rows.window:
        hidden |= key <= position - rows.window
    if rows.skip:
        # Tokens before it see themselves, so that the product has a value; `blank` takes it away.
        hidden |= (key < rows.skip) & (key != position)
    return torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, float("-inf"))


def attend(query: Tensor, key: Tensor, value: Tensor, segment: Segment, scale: float, out: Tensor) -> None:
    """query [R * C, kv_heads, share, d], key and value [R, kv_heads, L, d] -> out, of query's shape."""
    tokens, kv_heads, share, d = query.shape
    count, sequences = segment.count, segment.sequences
    if count >= CHUNK_TOKENS:
        flat = query.reshape(tokens, kv_heads * share, d).transpose(0, 1)[None]
        found = F.scaled_dot_product_attention(
            flat,
            key,
            value,
            attn_mask=segment.mask,
            is_causal=segment.causal,
            scale=scale,
            enable_gqa=share > 1,
        )
        out.copy_(found[0].transpose(0, 1).view(tokens, kv_heads, share, d))
    elif count == 1:
        # The heads of a KV head are rows of one product: keys are read once for all of them.
        out.copy_(F.scaled_dot_product_attention(query, key, value, attn_mask=segment.mask, scale=scale))
    else:
        split = query.view(sequences, count, kv_heads, share, d).transpose(1, 2)
        folded = split.reshape(sequences, kv_heads, count * share, d)
        found = F.scaled_dot_product_attention(folded, key, value, attn_mask=segment.mask, scale=scale)
        found = found.view(sequences, kv_heads, count, share, d).transpose(1, 2)
        out.copy_(found.reshape(tokens, kv_heads, share, d))


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, scale: float, out: Tensor
) -> None:
    """Like `attend` for one sequence over several runs of key and value [1, kv_heads, entries, d]: the
    scores of all runs under one softmax, read where they lie."""
    count, kv_heads, share, d = query.shape
    runs = segment.entries
    assert isinstance(runs, list)
    folded = query.transpose(0, 1).reshape(kv_heads, count * share, d) * scale
    scores = torch.cat([torch.bmm(folded, key[0].narrow(1, a, n).transpose(1, 2)) for a, n in runs], -1)
    if segment.mask is not None:
        scores += segment.mask
    weights = torch.softmax(scores, -1)
    found = query.new_zeros(kv_heads, count * share, d)
    at = 0
    for a, n in runs:
        found.baddbmm_(weights.narrow(2, at, n), value[0].narrow(1, a, n))
        at += n
    out.copy_(found.view(kv_heads, count, share, d).transpose(0, 1))
