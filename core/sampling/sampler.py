"""The sampler: one token per row of logits, greedy or from the filtered distribution.

Filters apply in SGLang's order: temperature, then top-k, then top-p over what top-k left, renormalised,
then min-p (Nguyen et al. 2024: at least min_p times the heaviest token's weight); vLLM has min-p before
top-k. Sampling inverts the cumulative distribution (tokens in index order) at one counter-based uniform
of the row's (seed, choice, position): one number per row, where Gumbel noise needs one per vocabulary entry,
and the law can be tested exactly by sweeping that number. Gumbel noise is there too: drafters that draw with
the same agree with the target more often (gumbel.py).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from bien.core.sampling.cut import draw_row, keep_row
from bien.core.sampling.gumbel import largest
from bien.core.sampling.rng import uniforms

COLDEST = 1e-5  # below this temperature only the maximum has weight, and float32 would divide by zero
_PIECE = 256  # tokens per piece of a two-level cumulative sum


def sample_rows(
    logits: Tensor,
    seeds: ArrayLike,
    positions: ArrayLike,
    temperature: ArrayLike,
    top_p: ArrayLike,
    top_k: ArrayLike,
    min_p: ArrayLike | None = None,
    choices: ArrayLike = 0,
    noise: Literal["quantile", "gumbel"] = "quantile",
) -> Tensor:
    """Draw one token per row.

    logits: [R, V], float; -inf forbids a token. The rest: [R] on the host. seeds: 64-bit. positions: of
    the token to draw, any numbering that is stable for a request. temperature: below `COLDEST` is greedy (the
    lowest index of equal maxima). top_p >= 1, top_k <= 0 and min_p = 0 are off. choices: which of a
    request's answers a row belongs to. noise: as `SpeculationSpec.noise`. Returns [R] int64 on the logits'
    device.
    """
    tokens = _greedy(logits)
    heat = np.asarray(temperature, np.float64)
    rows = np.flatnonzero(heat >= COLDEST)
    if len(rows):
        choice = np.broadcast_to(choices, heat.shape)[rows]
        seed, position = np.asarray(seeds)[rows], np.asarray(positions)[rows]
        index = torch.from_numpy(rows).to(logits.device)
        warm = logits if len(rows) == len(logits) else logits[index]
        how = (
            heat[rows],
            np.asarray(top_p, np.float64)[rows],
            np.asarray(top_k, np.int64)[rows],
            None if min_p is None else np.asarray(min_p, np.float64)[rows],
        )
        if noise == "gumbel":
            tokens[index] = largest(filtered_weights(warm, *how), seed, position, choice)
        else:
            tokens[index] = draw(warm, uniforms(seed, position, choice=choice), *how)
    return tokens


def draw(
    logits: Tensor,
    u: NDArray[np.float64],
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float64] | None = None,
) -> Tensor:
    """The token at quantile u[i] in [0, 1) of each row's filtered distribution. temperature > 0."""
    vocab, device = logits.shape[1], logits.device
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    top_k = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    min_p = np.zeros(len(u)) if min_p is None else np.minimum(min_p, 1.0)
    if device.type == "cpu":
        each = zip(
            u.tolist(), temperature.tolist(), top_p.tolist(), top_k.tolist(), min_p.tolist(), strict=True
        )
        host = logits.detach().numpy()
        room = np.empty(vocab, host.dtype)
        drawn = [_draw_on_host(row, room, *how) for row, how in zip(host, each, strict=True)]
        return torch.tensor(drawn, dtype=torch.int64)
    return _draw_on_device(logits, u, temperature, top_p, top_k, min_p)


def filtered_weights(
    logits: Tensor,
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float64] | None = None,
) -> Tensor:
    """[R, V] the distribution that `draw` draws from, not normalised: the heaviest token weighs 1, those that
    a filter takes 0. temperature > 0."""
    vocab = logits.shape[1]
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    top_k = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    min_p = np.zeros(len(logits)) if min_p is None else np.minimum(min_p, 1.0)
    if logits.device.type != "cpu":
        return _weights_on_device(logits, temperature, top_p, top_k, min_p)
    host = logits.detach().numpy()
    out = np.empty_like(host)
    each = zip(temperature.tolist(), top_p.tolist(), top_k.tolist(), min_p.tolist(), strict=True)
    for row, room, (heat, *how) in zip(host, out, each, strict=True):
        if not np.isfinite(row.max()):
            room[:] = np.arange(vocab) == row.argmax()
        else:
            _warmed(row, room, heat)
            keep_row(room, *how).spread(room)
    return torch.from_numpy(out)


def _draw_on_host(
    logits: NDArray[Any],
    room: NDArray[Any],
    u: float,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
) -> int:
    # Row by row in one place: a row stays in the processor's cache, and fresh memory for all of them costs
    # more than the arithmetic.
    most = logits.max()
    if not np.isfinite(most):  # those who share the step must not fail with it
        return int(logits.argmax())
    _warmed(logits, room, temperature, most)
    return draw_row(room, u, top_p, top_k, min_p)


def _warmed(logits: NDArray[Any], room: NDArray[Any], temperature: float, most: Any = None) -> None:
    np.subtract(logits, logits.max() if most is None else most, out=room)
    room /= temperature
    np.exp(room, out=room)


def _draw_on_device(
    logits: Tensor,
    u: NDArray[np.float64],
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float64],
) -> Tensor:
    weights = _weights_on_device(logits, temperature, top_p, top_k, min_p)
    return quantile(weights, torch.from_numpy(u).to(logits.device))


def _weights_on_device(
    logits: Tensor,
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float64],
) -> Tensor:
    vocab, device = logits.shape[1], logits.device
    scale = torch.from_numpy(temperature).to(device, logits.dtype)[:, None]
    weights = (logits - logits.amax(-1, keepdim=True)).div_(scale).exp_()
    rows = np.flatnonzero((top_p < 1) | (top_k < vocab))
    if len(rows):
        index = torch.from_numpy(rows).to(device)
        limits = torch.from_numpy(np.minimum(top_p[rows], 1.0)).to(device)
        weights[index] = filtered(weights[index], limits, torch.from_numpy(top_k[rows]).to(device))
    if min_p.any():
        # The heaviest token weighs 1 and has passed every filter. Compared in the dtype of the weights, so
        # that min_p = 1 keeps it.
        least = torch.from_numpy(min_p).to(device, weights.dtype)
        weights *= weights >= least[:, None]
    return weights


def quantile(weights: Tensor, u: Tensor) -> Tensor:
    """[R] the entry at quantile u [R] float64 in [0, 1) of each row of weights [R, V] >= 0, in index order;
    never one of weight zero."""
    return _search(weights, u, right=True)


def filtered(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero all but the top_k heaviest tokens, and of these all but the smallest set that reaches top_p of
    their weight (the token that crosses it included); of equal weights the lower index stays.

    weights: [R, V] >= 0. top_p: [R] float64 in 0..1. top_k: [R] int64 in 1..V. For accelerators: on the host
    `draw_row` draws by the same law without sorting.
    """
    values = weights.topk(int(top_k.max()), dim=-1).values
    rank = torch.arange(values.shape[1], device=weights.device)
    if bool((top_k < values.shape[1]).any()):
        values = values.masked_fill(rank >= top_k[:, None], 0.0)
    size = torch.minimum(_search(values, top_p, right=False) + 1, top_k)
    size = torch.where(top_p < 1, size, top_k)[:, None]
    least = values.gather(1, size - 1)
    above, equal = weights > least, weights == least
    room = size - above.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(-1) <= room
    return weights * (above | equal)


def _greedy(logits: Tensor) -> Tensor:
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64) or not len(logits):
        return logits.argmax(-1)
    # numpy's vectorised search takes a tenth of the time of torch's; both take the first of equals.
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def _search(weights: Tensor, share: Tensor, *, right: bool) -> Tensor:
    # The first token whose cumulative weight exceeds (right) or reaches `share` of the total. In two
    # levels, sums of pieces and then one piece: a sum can be vectorised, a cumulative sum cannot.
    rows, vocab = weights.shape
    if vocab % _PIECE:
        weights = F.pad(weights, (0, -vocab % _PIECE))
    pieces = weights.view(rows, -1, _PIECE)
    sums = pieces.sum(-1).double()
    below = sums.cumsum(-1)
    point = share * below[:, -1]
    piece = _first(below, point, right)
    row = torch.arange(rows, device=weights.device)
    inside = pieces[row, piece].cumsum(-1, dtype=torch.float64)
    start = below[row, piece] - sums[row, piece]
    return piece * _PIECE + _first(inside, point - start, right)


def _first(below: Tensor, point: Tensor, right: bool) -> Tensor:
    # Rounding may carry the point over the total; it must never choose a token of weight zero.
    total = below[:, -1]
    limit = torch.nextafter(total, torch.zeros_like(total)) if right else total
    point = torch.minimum(point.clamp(min=0), limit)[:, None]
    return torch.searchsorted(below, point, right=right)[:, 0].clamp_(max=below.shape[1] - 1)
