"""Quantizer `none`: full-precision products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from bien.core.api import Context, LinearMethod, Provider, Quantizer, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class NoneConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing to choose."""

    def bytes_per_parameter(self, name: str, item: int) -> float | None:
        return None


class FullLinear:
    """x @ weight.T + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, transpose: bool) -> None:
        from torch.nn import functional

        self.out_features = weight.shape[0]
        # Stored as [in, out], products of 4 to 32 tokens take a third less time in oneMKL, of one as long.
        self._weight = weight.t().contiguous().t() if transpose else weight
        self._bias = bias
        self._linear = functional.linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._weight, self._bias)


class NoQuantizer:
    """Weights stay in the compute dtype. The head stays as it is: tied, it is also the embedding."""

    def matches(self, config: Mapping[str, Any]) -> bool:
        return not config.get("quantization_config")

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearMethod:
        return FullLinear(weight, bias, transpose=name not in ("lm_head", "embed_tokens"))

    def close(self) -> None:
        pass


def make(config: NoneConfig, ctx: Context) -> Quantizer:
    return NoQuantizer()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("quantizer", "none", make, NoneConfig, summary="weights in the compute dtype")]
