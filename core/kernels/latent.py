"""How the torch kernels attend over latents (MLA) and choose positions for it (DSA), row by row.

DeepSeek-AI, "DeepSeek-V2" (2024): queries are brought into the latent space, so that one entry per position
serves all heads. "DeepSeek-V3.2" (2025): an indexer with few narrow heads chooses the positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bien.core.executors.rows import GroupRows

SCORES = 1 << 24  # elements of a block of scores: longer chunks are taken in parts


def latent_attention(
    query: Tensor, rows: GroupRows, layer: int, scale: float, rank: int, chosen: Tensor | None
) -> Tensor:
    """See `Kernels.latent_attention`."""
    heads = query.shape[1]
    out = query.new_empty(len(query), heads, rank)
    for entries, start, tokens in _sequences(rows, layer):
        for part in _parts(tokens, heads * len(entries)):
            own = _own(start, part, tokens, query.device)
            if chosen is None:
                out[part] = _dense(query[part], entries, own, scale, rank, rows.skip)
            else:
                out[part] = _sparse(query[part], entries, chosen[part], scale, rank)
    if rows.skip:
        rows.blank(out)
    return out


def choose(query: Tensor, weights: Tensor, rows: GroupRows, layer: int, count: int) -> Tensor:
    """See `Kernels.choose`."""
    out = torch.full((len(query), count), -1, dtype=torch.int64, device=query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    for keys, start, tokens in _sequences(rows, layer):
        for part in _parts(tokens, query.shape[1] * len(keys)):
            own = _own(start, part, tokens, query.device)
            # [C, heads, L]; what is not above zero does not count. 16 bits would make many sums equal.
            found = torch.relu(query[part].to(wide) @ keys.t().to(wide))
            scores = (weights[part, :, None] * found).sum(1)
            scores.masked_fill_(torch.arange(len(keys), device=keys.device) > own[:, None], float("-inf"))
            scores[:, : rows.skip] = float("-inf")
            # Stable: of equal scores the lowest position comes first.
            best = torch.sort(scores, dim=-1, descending=True, stable=True)
            most = min(count, len(keys))
            places = best.indices[:, :most]
            out[part, :most] = places.masked_fill(best.values[:, :most] == float("-inf"), -1)
    return out


def _dense(query: Tensor, entries: Tensor, own: Tensor, scale: float, rank: int, skip: int) -> Tensor:
    tokens, heads, width = query.shape
    scores = (query.reshape(-1, width) @ entries.t()).view(tokens, heads, -1) * scale
    if tokens > 1:
        later = torch.arange(len(entries), device=entries.device) > own[:, None]
        scores.masked_fill_(later[:, None], float("-inf"))
    scores[..., :skip] = float("-inf")
    return (torch.softmax(scores, -1).view(tokens * heads, -1) @ entries[:, :rank]).view(tokens, heads, rank)


def _sparse(query: Tensor, entries: Tensor, chosen: Tensor, scale: float, rank: int) -> Tensor:
    chosen = chosen[:, : len(entries)]
    picked = entries[chosen.clamp(min=0)]  # [C, K, width]
    scores = query @ picked.transpose(1, 2) * scale
    scores.masked_fill_((chosen < 0)[:, None], float("-inf"))
    return torch.softmax(scores, -1) @ picked[:, :, :rank]


def _sequences(rows: GroupRows, layer: int) -> Iterator[tuple[Tensor, int, range]]:
    # Each sequence's entries up to its last token, in order, its first position, and its flat tokens.
    pool, size = rows.pool.layers[layer], rows.block_tokens
    for i, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
        end = start + count
        blocks = torch.from_numpy(rows.table[i, : -(-end // size)].astype(np.int64)).to(rows.device)
        entries = pool.index_select(0, blocks).flatten(0, 1)[:end]
        first = int(rows.offsets[i])
        yield entries, start, range(first, first + count)


def _parts(tokens: range, each: int) -> Iterator[slice]:
    step = max(1, SCORES // max(1, each))
    for first in range(tokens.start, tokens.stop, step):
        yield slice(first, min(first + step, tokens.stop))


def _own(start: int, part: slice, tokens: range, device: torch.device) -> Tensor:
    # [C] the positions of these flat tokens.
    return torch.arange(part.start, part.stop, device=device) + (start - tokens.start)
