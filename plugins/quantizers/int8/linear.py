"""The levels of int8 weights: imported by the factory only, since it needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import Kernels, LinearMethod

LEVELS = 127.0


class FullLinear:
    """A layer that is kept in full precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class Int8Quantizer:
    """See `Quantizer`. Reads full-precision checkpoints and quantizes them while loading."""

    def __init__(self, kernels: Kernels, *, head: bool) -> None:
        self._kernels, self._head = kernels, head

    def matches(self, config: Mapping[str, Any]) -> bool:
        return not config.get("quantization_config")

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearMethod:
        if name == "embed_tokens" or (name == "lm_head" and not self._head):
            return FullLinear(weight, bias)
        # In float32 at least: the scale of a bfloat16 weight would be as coarse as the weight.
        wide = weight if weight.dtype == torch.float64 else weight.float()
        scale = (wide.abs().amax(1) / LEVELS).clamp_(min=torch.finfo(wide.dtype).tiny)
        levels = (wide / scale[:, None]).round_().to(torch.int8)
        return self._kernels.int8_linear(levels, scale, bias)

    def close(self) -> None:
        pass
