"""The quantizer of int8 weights: imported by the factory only, since it needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bien.core.api import Kernels, LinearMethod
from bien.plugins.quantizers._rows import FullLinear, int8_rows


class Int8Quantizer:
    """See `Quantizer`. Reads full-precision checkpoints and quantizes them while loading."""

    def __init__(self, kernels: Kernels, *, head: bool) -> None:
        self._kernels, self._head = kernels, head

    def matches(self, config: Mapping[str, Any]) -> bool:
        return not config.get("quantization_config")

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearMethod:
        if name == "embed_tokens" or (name == "lm_head" and not self._head):
            return FullLinear(weight, bias)
        return self._kernels.int8_linear(*int8_rows(weight), bias)

    def close(self) -> None:
        pass
