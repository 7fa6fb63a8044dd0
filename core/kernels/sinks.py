"""How the torch kernels attend with sinks: scores of their own beside those of positions (gpt-oss).

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025): every head has one, which takes its share of the
softmax and has no value. What positions give is then shrunk by their part of the sum, which the logarithm of
the sum says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bien.core.kernels.attention import CHUNK_TOKENS, Segment

SCORES = 1 << 24  # elements of a block of scores: longer chunks are taken in parts


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, scale: float, out: Tensor, *, sinks: Tensor
) -> None:
    """Like `attend`, and like `attend_runs` where the segment has several runs; sinks [heads]."""
    _, kv_heads, share, d = query.shape
    rows, count = segment.sequences, segment.count
    query = query.view(rows, count, kv_heads, share, d).transpose(1, 2)
    found = out.view(rows, count, kv_heads, share, d).transpose(1, 2)
    # [kv_heads, share] against scores [R, kv_heads, C, share, L].
    wide = torch.promote_types(query.dtype, torch.float32)
    own = sinks.to(wide).view(kv_heads, 1, share)
    pieces = [(key, value)]
    if isinstance(segment.entries, list) and len(segment.entries) > 1:
        pieces = [(key.narrow(2, a, n), value.narrow(2, a, n)) for a, n in segment.entries]
    length = sum(piece.shape[2] for piece, _ in pieces)
    step = max(1, SCORES // (rows * kv_heads * share * length))
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        folded = query[:, :, part].flatten(2, 3) * scale
        products = [folded @ k.transpose(2, 3) for k, _ in pieces]
        scores = torch.cat(products, -1) if len(products) > 1 else products[0]
        scores = scores.to(wide)
        split = scores.view(rows, kv_heads, -1, share, length)
        mask = _mask(segment, part, length, split)
        if mask is not None:
            split += mask
        kept = torch.sigmoid(split.logsumexp(-1) - own)
        weights = torch.softmax(scores, -1).to(query.dtype)
        mixed, at = query.new_zeros(()), 0
        for _, v in pieces:
            mixed = mixed + weights.narrow(-1, at, v.shape[2]) @ v
            at += v.shape[2]
        found[:, :, part] = mixed.view(rows, kv_heads, -1, share, d).mul_(kept[..., None])


def _mask(segment: Segment, part: slice, length: int, scores: Tensor) -> Tensor | None:
    # Additive, [R or 1, 1, C, share or 1, L] of these tokens.
    if segment.causal:
        own = torch.arange(part.start, part.stop, device=scores.device)[:, None]
        later = torch.arange(length, device=scores.device) > own
        hidden = torch.zeros(later.shape, dtype=scores.dtype, device=scores.device)
        return hidden.masked_fill_(later, float("-inf"))[:, None]
    mask = segment.mask
    if mask is None:
        return None
    if segment.count >= CHUNK_TOKENS:  # [C, L]
        return mask[part, None]
    # [C * share, L], or [R, 1, C * share, L], or [R, 1, 1, L].
    heads = max(1, mask.shape[-2] // segment.count)
    return mask.view(-1, 1, segment.count, heads, length)[:, :, part]
