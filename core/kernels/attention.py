"""How the torch kernel runs paged attention: a step's rows as a few dense products.

A row whose blocks lie one after the other in the pool is read in place, if it is long or computes many
tokens. The others are gathered, rows of like length together, into a scratch buffer that stays in the
processor's cache. Masks and indices are built once per step for all layers of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bien.core.executors.rows import GroupRows

VIEW_TOKENS = 768  # shorter rows are cheaper gathered together than called one by one
CHUNK_TOKENS = 16  # rows that compute at least so many tokens run alone
SCRATCH_BYTES = 2 << 20  # per gathered bucket: about one core's second-level cache
SLACK = 1.25  # a bucket's longest row may have so many times the blocks of its shortest


@dataclass(slots=True)
class Segment:
    """Rows computed by one dense product: R sequences of C tokens over L pool entries."""

    query: slice | Tensor  # which flat tokens
    sequences: int  # R
    count: int  # C
    entries: slice  # of the pool's flat entries (R = 1), when read in place
    blocks: Tensor | None  # [R * blocks] to gather, when not
    mask: Tensor | None  # additive, [C, L] or [R, 1, C * heads per KV head, L]
    causal: bool  # a chunk from position 0: the top-left causal mask of the product itself


def plan_attention(rows: GroupRows, share: int, dtype: torch.dtype) -> list[Segment]:
    """Segments of a step; `share` = query heads per KV head."""
    size = rows.block_tokens
    ends = rows.starts + rows.counts
    first = np.maximum(rows.starts - rows.window + 1, 0) // size if rows.window else np.zeros_like(ends)
    blocks = -(-ends // size) - first
    alone: list[int] = []
    gathered: list[int] = []
    for i, (count, n) in enumerate(zip(rows.counts.tolist(), blocks.tolist(), strict=True)):
        single = count >= CHUNK_TOKENS or n * size >= VIEW_TOKENS or len(blocks) == 1
        (alone if single else gathered).append(i)
    segments = []
    for i in alone:
        used = rows.table[i, first[i] : first[i] + blocks[i]]
        segments.append(_single(rows, i, used, int(first[i]) * size, share, dtype))
    segments += [_bucket(rows, b, first, blocks, share, dtype) for b in _buckets(rows, gathered, blocks, dtype)]
    return segments


def _single(
    rows: GroupRows, i: int, used: NDArray[np.int32], begin: int, share: int, dtype: torch.dtype
) -> Segment:
    size, start, count = rows.block_tokens, int(rows.starts[i]), int(rows.counts[i])
    length = start + count - begin
    query = slice(int(rows.offsets[i]), int(rows.offsets[i + 1]))
    at = int(used[0]) * size
    if len(used) == 1 or bool((np.diff(used) == 1).all()):
        entries, blocks = slice(at, at + length), None
    else:
        entries, blocks = slice(0, length), torch.from_numpy(used.astype(np.int64)).to(rows.device)
    causal = start == 0 and count > 1 and (not rows.window or count <= rows.window)
    mask = None
    # One token sees every entry from its window's first block on, but those before the window.
    if not causal and (count > 1 or (rows.window and start - rows.window >= begin)):
        position = torch.arange(start, start + count, device=rows.device)
        mask = _mask(position[:, None], torch.arange(begin, begin + length, device=rows.device), rows.window, dtype)
        if count < CHUNK_TOKENS:
            mask = mask.repeat_interleave(share, 0)
    return Segment(query, 1, count, entries, blocks, mask, causal)


def _buckets(
    rows: GroupRows, members: list[int], blocks: NDArray[np.int32], dtype: torch.dtype
) -> list[list[int]]:
    # Same token count, like block counts, and no more than the scratch buffer takes.
    width = rows.pool.layers[0].shape[-1] * rows.block_tokens * dtype.itemsize
    order = sorted(members, key=lambda i: (rows.counts[i], blocks[i], i))
    buckets: list[list[int]] = []
    for i in order:
        last = buckets[-1] if buckets else []
        if (
            last
            and rows.counts[last[0]] == rows.counts[i]
            and blocks[i] <= SLACK * blocks[last[0]] + 1
            and (len(last) + 1) * int(blocks[i]) * width <= SCRATCH_BYTES
        ):
            last.append(i)
        else:
            buckets.append([i])
    return [sorted(b) for b in buckets]


def _bucket(
    rows: GroupRows,
    members: list[int],
    first: NDArray[np.int32],
    blocks: NDArray[np.int32],
    share: int,
    dtype: torch.dtype,
) -> Segment:
    size, device = rows.block_tokens, rows.device
    index = np.asarray(members)
    count, most = int(rows.counts[members[0]]), int(blocks[index].max())
    # Columns past a row's own blocks read whatever block comes there: the mask hides them.
    column = np.minimum(first[index][:, None] + np.arange(most), rows.table.shape[1] - 1)
    gather = torch.from_numpy(rows.table[index[:, None], column].astype(np.int64).reshape(-1)).to(device)
    token = rows.offsets[index][:, None] + np.arange(count)
    query: slice | Tensor = slice(int(token[0, 0]), int(token[-1, -1]) + 1)
    if index[-1] - index[0] + 1 != len(index):
        query = torch.from_numpy(token.reshape(-1)).to(device)
    begin = first[index].astype(np.int64) * size
    start = rows.starts[index].astype(np.int64)
    mask = None
    if count > 1 or rows.window or bool((start - begin + 1 != most * size).any()):
        position = torch.from_numpy(start[:, None] + np.arange(count)).to(device)[:, :, None]
        key = torch.from_numpy(begin[:, None] + np.arange(most * size)).to(device)[:, None]
        mask = _mask(position, key, rows.window, dtype)[:, None]
        if count > 1:
            mask = mask.repeat_interleave(share, 2)
    return Segment(query, len(members), count, slice(0, most * size), gather, mask, False)


def _mask(position: Tensor, key: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    hidden = key > position
    if window:
        hidden |= key <= position - window
    return torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, float("-inf"))


def attend_segment(query: Tensor, entries: Tensor, segment: Segment, scale: float) -> Tensor:
    """query [R * C, heads, d], entries [R, L, 2, kv_heads, d] -> [R * C, heads * d]."""
    count, sequences = segment.count, segment.sequences
    tokens, heads, d = query.shape
    kv_heads = entries.shape[3]
    share = heads // kv_heads
    key, value = entries.permute(2, 0, 3, 1, 4).unbind(0)  # [R, kv_heads, L, d]
    if count == 1:
        folded = query.view(sequences, kv_heads, share, d)
    elif count >= CHUNK_TOKENS:
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=segment.mask,
            is_causal=segment.causal,
            scale=scale,
            enable_gqa=share > 1,
        )
        return out[0].transpose(0, 1).reshape(tokens, heads * d)
    else:
        # The heads of a KV head become further rows of its product: keys are read once for all of them.
        grouped = query.view(sequences, count, kv_heads, share, d).transpose(1, 2)
        folded = grouped.reshape(sequences, kv_heads, count * share, d)
    if segment.causal:
        position = torch.arange(count, device=query.device)
        mask = _mask(position[:, None], position, 0, query.dtype).repeat_interleave(share, 0)
    else:
        mask = segment.mask
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    if count > 1:
        out = out.view(sequences, kv_heads, count, share, d).transpose(1, 2)
    return out.reshape(tokens, heads * d)
