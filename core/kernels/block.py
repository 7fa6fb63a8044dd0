"""How the torch kernels attend from a block of queries to a stored context and to entries given beside it.

One primitive for drafters and trees: what is stored of a sequence is seen by all of its queries (inside the
window of each), what is given by those that a mask says. Sequences of like length are gathered together; a
long one whose blocks lie in one run is read in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bien.core.executors.rows import GroupRows
from bien.core.kernels.attention import VIEW_TOKENS

SLACK = 1.25  # a part's longest context may have so many times the blocks of its shortest
GATHERED = 32 << 20  # bytes of keys and values gathered at a time
SCORES = 1 << 24  # elements of a block of scores: many queries are taken in pieces


@dataclass(slots=True)
class Part:
    """Sequences whose contexts are gathered together, padded to `length` positions each."""

    members: slice | Tensor  # which of the step's
    blocks: Tensor | slice  # [R * blocks] int64; of one sequence read in place, its run
    position: Tensor  # [R, length] of every gathered entry
    outside: Tensor  # [R, 1, length] bool: no entry of the sequence's, or one that nobody may see
    clear: bool  # nothing is


def block_attention(
    query: Tensor,
    kv: Tensor,
    rows: GroupRows,
    layer: int,
    scale: float,
    mask: Tensor | None,
    positions: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `Kernels.block_attention`."""
    parts: list[Part] | None = rows.plans.get("block")
    if parts is None:
        parts = rows.plans["block"] = _parts(rows)
    if rows.window and positions is None:
        first = torch.from_numpy(rows.starts.astype(np.int64)).to(rows.device)
        positions = first[:, None] + torch.arange(query.shape[1], device=rows.device)
    if mask is not None and mask.shape[0] == 1:
        mask = mask.expand(len(query), -1, -1)
    pool = rows.pool.layers[layer]
    out = query.new_empty(*query.shape[:2], query.shape[2] * query.shape[3])
    for part in parts:
        many = len(part.position)
        blocks = part.blocks
        held = pool[blocks] if isinstance(blocks, slice) else pool.index_select(0, blocks)
        context = held.view(many, -1, pool.shape[-1])
        own = query[part.members]
        hidden = _hidden(part, rows.window, None if positions is None else positions[part.members])
        given = kv[part.members].to(context.dtype)
        inside = None if mask is None else mask[part.members]
        length = context.shape[1] + given.shape[1]
        step = max(1, SCORES // max(1, many * own.shape[2] * length))
        found = [
            _attend(
                own[:, at : at + step],
                context,
                given,
                scale,
                None if hidden is None else hidden[:, at : at + step] if hidden.shape[1] > 1 else hidden,
                None if inside is None else inside[:, at : at + step],
                sinks,
            )
            for at in range(0, own.shape[1], step)
        ]
        out[part.members] = found[0] if len(found) == 1 else torch.cat(found, 1)
    return out


def _attend(
    query: Tensor,
    context: Tensor,
    given: Tensor,
    scale: float,
    hidden: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    # query [R, Q, heads, d], context [R, L, width], given [R, K, width], hidden [R, Q or 1, L].
    many, count, heads, d = query.shape
    if not context.shape[1] + given.shape[1]:
        return query.new_zeros(many, count, heads * d)
    kv_heads = context.shape[-1] // (2 * d)
    share = heads // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    # The heads of a KV head are rows of one product: keys are read once for all of them.
    split = query.view(many, count, kv_heads, share, d).transpose(1, 2) * scale
    folded = split.reshape(many, kv_heads, count * share, d)
    entries = [x.view(many, -1, 2, kv_heads, d).permute(2, 0, 3, 1, 4) for x in (context, given)]
    pieces = [(folded @ key.transpose(2, 3)).to(wide) for key, _ in entries]
    for scores, closed in zip(pieces, (hidden, None if mask is None else ~mask), strict=True):
        if closed is not None:
            seen = scores.view(many, kv_heads, count, share, -1)
            seen.masked_fill_(closed[:, None, :, None], float("-inf"))
    scores = torch.cat(pieces, -1)
    # By hand: a query may see nothing, and gets zeros; sinks take a share and have no value.
    most = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(wide).min)
    if sinks is not None:
        beside = sinks.to(wide).view(kv_heads, 1, share).expand(-1, count, -1).reshape(1, kv_heads, -1, 1)
        most = torch.maximum(most, beside)
    weights = scores.sub_(most).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (beside - most).exp()
    weights = (weights / total.clamp_(min=torch.finfo(wide).tiny)).to(query.dtype)
    length = context.shape[1]
    mixed = weights[..., :length] @ entries[0][1].to(query.dtype)
    mixed += weights[..., length:] @ entries[1][1].to(query.dtype)
    found = mixed.view(many, kv_heads, count, share, d).transpose(1, 2)
    return found.reshape(many, count, heads * d)


def _hidden(part: Part, window: int, positions: Tensor | None) -> Tensor | None:
    if not window or positions is None:
        return None if part.clear else part.outside
    early = part.position[:, None] <= positions[:, :, None] - window
    return part.outside | early


def _parts(rows: GroupRows) -> list[Part]:
    starts = rows.starts.astype(np.int64)
    begin = np.full(len(starts), rows.skip)
    if rows.window:
        begin = np.maximum(begin, starts - rows.window + 1)
    size = rows.block_tokens
    first = np.minimum(begin, starts) // size
    blocks = -(-starts // size) - first
    each = rows.pool.layers[0][0].nbytes
    groups: list[list[int]] = []
    runs: list[list[int]] = []
    for i in sorted(range(len(starts)), key=lambda i: (blocks[i], i)):
        used = rows.table[i, first[i] : first[i] + blocks[i]]
        if blocks[i] * size >= VIEW_TOKENS and bool((used[1:] - used[:-1] == 1).all()):
            runs.append([i])
            continue
        last = groups[-1] if groups else []
        like = bool(last) and blocks[i] <= SLACK * blocks[last[0]] + 1
        if like and (len(last) + 1) * blocks[i] * each <= GATHERED:
            last.append(i)
        else:
            groups.append([i])
    gathered = [_part(rows, np.array(sorted(members)), first, blocks) for members in groups]
    for members in runs:
        part = _part(rows, np.array(members), first, blocks)
        begun = int(rows.table[members[0], first[members[0]]])
        part.blocks = slice(begun, begun + int(blocks[members[0]]))
        gathered.append(part)
    return gathered


def _part(
    rows: GroupRows,
    members: np.ndarray[tuple[int], np.dtype[np.int64]],
    first: np.ndarray[tuple[int], np.dtype[np.int64]],
    blocks: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Part:
    size, device = rows.block_tokens, rows.device
    most = int(blocks[members].max())
    # Columns past a sequence's own blocks read whatever block comes there: they are outside.
    column = np.minimum(first[members][:, None] + np.arange(most), rows.table.shape[1] - 1)
    used = rows.table[members[:, None], column].astype(np.int64).reshape(-1)
    position = first[members][:, None] * size + np.arange(most * size)
    outside = (position >= rows.starts[members][:, None]) | (position < rows.skip)
    index: slice | Tensor = slice(int(members[0]), int(members[-1]) + 1)
    if members[-1] - members[0] + 1 != len(members):
        index = torch.from_numpy(members).to(device)
    return Part(
        index,
        torch.from_numpy(used).to(device),
        torch.from_numpy(position).to(device),
        torch.from_numpy(outside).to(device)[:, None],
        not outside.any(),
    )
