"""What quantizers share: layers in full precision, and levels of rows. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LEVELS = 127.0
# oneMKL multiplies fewer than 16 rows three at a time, reading the whole weight for each three: from 7 on, 16
# rows cost less (15 of an output head of 49,152 x 576: less than half).
FEW, WHOLE = 7, 16


class FullLinear:
    """A layer that is kept in full precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        if FEW <= rows < WHOLE and x.dtype is torch.float32 and not x.is_cuda:
            return F.linear(F.pad(x, (0, 0, 0, WHOLE - rows)), self._weight, self._bias)[:rows]
        return F.linear(x, self._weight, self._bias)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> (levels int8, scale [out]): symmetric per output."""
    # In float32 at least: the scale of a bfloat16 weight would be as coarse as the weight.
    wide = weight if weight.dtype == torch.float64 else weight.float()
    scale = (wide.abs().amax(1) / LEVELS).clamp_(min=torch.finfo(wide.dtype).tiny)
    return (wide / scale[:, None]).round_().to(torch.int8), scale
