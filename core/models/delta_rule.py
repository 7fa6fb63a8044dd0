"""The gated delta rule over a ragged batch: token by token across sequences, or chunk by chunk along one.

Yang, Kautz, Hatamizadeh, "Gated delta networks" (2024); Kimi Team, "Kimi Linear" (2025) for a decay per
channel. Per head, with state S [value, key], log-decay g <= 0 per key channel (or one for all of them) and
rate b in (0, 1):

    S <- S diag(exp(g));  S <- S + b (v - S k) k^T;  o = S q
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows

CHUNK = 16  # tokens that are computed together
LONG = 8  # rows with more tokens go chunk by chunk
SIZE = 1 << 21  # elements of the largest tensor on the way, chunks of a row side by side


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Run the rule along every sequence of a ragged batch.

    state [S, heads, d, d] before the rows (it is overwritten); q, k, v [N, heads, d]; decay, the log-decay g,
    [N, heads, d] or [N, heads, 1]; rate [N, heads]; all in the state's dtype. Returns the outputs
    [N, heads, d] and the states that `Rows.store_states` wants.
    """
    mixed = torch.empty_like(v)
    keep, ends = rows.keep.astype(np.int64), np.cumsum(rows.keep, dtype=np.int64)
    kept = state.new_empty(int(ends[-1]), *state.shape[1:])
    done = np.zeros(len(rows.counts), np.int64)  # tokens of a row that lie behind
    for i in np.flatnonzero(rows.counts > LONG).tolist():
        done[i] = int(rows.counts[i]) - int(keep[i]) + 1  # to the first state that is kept
        part = slice(int(rows.offsets[i]), int(rows.offsets[i]) + int(done[i]))
        mixed[part], state[i] = _along(state[i], q[part], k[part], v[part], decay[part], rate[part])
        kept[int(ends[i] - keep[i])] = state[i]
    for t in range(int((rows.counts - done).max())):
        active = np.flatnonzero(rows.counts - done > t)
        at = done[active] + t
        row, token = _index(active, q), _index(rows.offsets[active] + at, q)
        key = k[token][..., None]  # [rows, heads, d, 1]
        s = state[row].mul_(decay[token].exp()[..., None, :])
        error = v[token] - (s @ key)[..., 0]
        s.addcmul_((rate[token][..., None] * error)[..., None], key.transpose(2, 3))
        mixed[token] = (s @ q[token][..., None])[..., 0]
        state[row] = s
        # The last `keep` tokens of a row leave their state behind.
        after = at - (rows.counts[active] - keep[active])
        late = np.flatnonzero(after >= 0)
        if len(late):
            kept[_index((ends - keep)[active[late]] + after[late], q)] = s[_index(late, q)]
    return mixed, kept.flatten(1)


def _index(places: np.ndarray[tuple[int], np.dtype[np.int64]], like: Tensor) -> Tensor:
    return torch.from_numpy(places).to(like.device)


def _along(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    # One sequence: state [heads, d, d], the others [T, heads, .] -> outputs [T, heads, d], state. With G_i
    # the sum of g up to token i of a chunk and w_i = b_i (v_i - S_{i-1} diag(exp(g_i)) k_i), what it writes:
    #     S_i = S_0 diag(exp(G_i)) + sum over j <= i of w_j (k_j exp(G_i - G_j))^T
    # so that all w of a chunk solve one triangular system, linear in S_0.
    tokens, (heads, d) = len(q), q.shape[1:]
    rest = -tokens % CHUNK  # tokens that change nothing fill the last chunk
    q, k, v, decay, rate = (
        F.pad(x, (0, 0, 0, 0, 0, rest)).view(-1, CHUNK, heads, x.shape[-1]).transpose(1, 2)
        for x in (q, k, v, decay, rate[..., None])
    )  # [chunks, heads, CHUNK, .]
    mixed, together = torch.empty_like(v), max(1, SIZE // (heads * CHUNK * CHUNK * d))
    into = state.transpose(1, 2)  # [heads, key, value]
    for first in range(0, len(q), together):
        part = slice(first, first + together)
        inner = _inside(*(x[part] for x in (q, k, v, decay, rate)))
        for i, (written, cleared, asked, pairs, left, last) in enumerate(zip(*inner, strict=True), first):
            wrote = written - cleared @ into
            mixed[i] = asked @ into + pairs @ wrote
            into = torch.baddbmm(into * left, last, wrote)
    return mixed.transpose(1, 2).flatten(0, 1)[:tokens], into.transpose(1, 2)


def _inside(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
    # What chunks do whatever state they begin with. Only differences G_i - G_j <= 0 are exponentiated:
    # nothing overflows, however strong the decay is.
    total = decay.cumsum(2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    since = (total[:, :, :, None] - total[:, :, None]).masked_fill_(later[..., None], float("-inf")).exp_()
    faded = since * k[:, :, None]  # [chunks, heads, i, j, d]: k_j exp(G_i - G_j)
    pairs = torch.matmul(faded, torch.stack([k, q], -1))  # [.., i, j, 2]: its products with k_i and q_i
    begun = total.exp()
    both = torch.linalg.solve_triangular(
        torch.tril(rate * pairs[..., 0], -1),
        rate * torch.cat([v, k * begun], -1),
        upper=False,
        unitriangular=True,
    )
    written, cleared = both.split(v.shape[-1], -1)
    left, last = begun[:, :, -1, :, None], faded[:, :, -1].transpose(2, 3)
    return written, cleared, q * begun, pairs[..., 1], left, last
