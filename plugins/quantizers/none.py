"""Quantizer `none`: full-precision products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from bien.core.api import Context, LinearMethod, Provider, Quantizer, StackedMethod, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


ALIGNMENT = 16  # bytes, of rows and columns: the grouped product takes no others


class NoneConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing to choose."""

    def bytes_per_parameter(self, name: str, item: int) -> float | None:
        return None


class FullLinear:
    """x @ weight.T + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from torch.nn import functional

        self.out_features = weight.shape[0]
        # Stored as [in, out], products of 4 to 32 tokens take a third less time in oneMKL, of one as long.
        self.weight = weight.t().contiguous().t()
        self.bias = bias
        self._linear = functional.linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)


class StackedLinear:
    """The weights of several `FullLinear` in one tensor [experts, in, out], multiplied by torch's grouped
    product: of 2 to 500 rows 5 to 10 % faster than one product after the other, of more as fast."""

    def __init__(self, layers: list[FullLinear]) -> None:
        from torch import stack
        from torch.nn import functional

        self._weight = stack([layer.weight.t() for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = stack(biases) if biases else None
        for layer, weight in zip(layers, self._weight, strict=True):
            layer.weight = weight.t()
        self._product = functional.grouped_mm

    def __call__(self, x: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
        out = self._product(x, self._weight, offs=ends)
        return out if self._bias is None else out.add_(self._bias[expert])


class NoQuantizer:
    """Weights stay in the compute dtype. The head stays as it is: tied, it is also the embedding."""

    def matches(self, config: Mapping[str, Any]) -> bool:
        return not config.get("quantization_config")

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearMethod:
        if name in ("lm_head", "embed_tokens"):
            from bien.plugins.quantizers._rows import FullLinear as UntransposedLinear

            return UntransposedLinear(weight, bias)
        return FullLinear(weight, bias)

    def stack(self, layers: list[LinearMethod]) -> StackedMethod | None:
        from torch import float64

        full = [layer for layer in layers if isinstance(layer, FullLinear)]
        weight = full[0].weight
        aligned = all(size * weight.itemsize % ALIGNMENT == 0 for size in weight.shape)
        if weight.is_cuda or weight.dtype is float64 or not aligned:
            return None
        return StackedLinear(full)

    def close(self) -> None:
        pass


def make(config: NoneConfig, ctx: Context) -> Quantizer:
    return NoQuantizer()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("quantizer", "none", make, NoneConfig, summary="weights in the compute dtype")]
