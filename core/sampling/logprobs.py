"""Log-probabilities of tokens out of logits, for the rows that ask."""

from __future__ import annotations

import torch
from torch import Tensor

from bien.core.logprobs import TokenLogprobs
from bien.core.plan import I32


def token_logprobs(logits: Tensor, tokens: I32, top: int) -> TokenLogprobs:
    """logits: [N, V] as the model gave them. tokens: [N]. top: alternatives per token, at most V."""
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    values = torch.log_softmax(wide, -1)
    index = torch.from_numpy(tokens.astype("int64")).to(values.device)
    chosen = _packed(values.gather(1, index[:, None]))
    top = min(top, values.shape[1])
    if top <= 0:
        return TokenLogprobs(chosen)
    best = values.topk(top, dim=-1)
    return TokenLogprobs(
        chosen, top, best.indices.cpu().numpy().astype("<u4").tobytes(), _packed(best.values)
    )


def _packed(values: Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()
