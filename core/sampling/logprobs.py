"""Log-probabilities of tokens out of logits, for the rows that ask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bien.core.logprobs import TokenLogprobs
from bien.core.plan import I32

SLICE = 64  # rows whose logits exist at a time: a prompt's, all at once, would take gigabytes


def token_logprobs(logits: Tensor, tokens: I32, top: int, *, ranks: bool = False) -> TokenLogprobs:
    """logits: [N, V] as the model gave them. tokens: [N]. top: alternatives per token, at most V. ranks:
    also say how many tokens are likelier."""
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    values = torch.log_softmax(wide, -1)
    index = torch.from_numpy(tokens.astype("int64")).to(values.device)
    own = values.gather(1, index[:, None])
    out = TokenLogprobs(_packed(own))
    if ranks:
        out.ranks = _ids((values > own).sum(-1) + 1)
    out.top = max(0, min(top, values.shape[1]))
    if out.top:
        best = values.topk(out.top, dim=-1)
        out.ids, out.values = _ids(best.indices), _packed(best.values)
    return out


def sliced_logprobs(hidden: Tensor, head: Callable[[Tensor], Tensor], tokens: I32, top: int) -> TokenLogprobs:
    """Of a prompt's tokens [N >= 1], with ranks. hidden: [N, H] of the positions before them. head: hidden
    states to logits."""
    parts = [
        token_logprobs(head(hidden[at : at + SLICE]), tokens[at : at + SLICE], top, ranks=True)
        for at in range(0, len(tokens), SLICE)
    ]
    return TokenLogprobs.joined(parts)


def _packed(values: Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()


def _ids(values: Tensor) -> bytes:
    return values.cpu().numpy().astype("<u4").tobytes()
