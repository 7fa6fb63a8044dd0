"""The quantizer contract: weight formats and linear methods; never model code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LinearMethod(Protocol):
    """A linear layer's product, weights inside."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's dtype."""
        ...


class StackedMethod(Protocol):
    """One linear layer of each of a mixture's experts, as one product."""

    def __call__(self, x: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
        """x [M, in], rows of an expert one after the other, experts in order; ends [experts] int32: where the
        rows of each end; expert [M] int64: whose each row is -> [M, out], in x's dtype."""
        ...


class Quantizer(Protocol):
    """Makes the linear layers of a model from its full-precision weights."""

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether it can read this checkpoint (its `quantization_config`, or none)."""
        ...

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearMethod:
        """`weight` is [out, in] in the compute dtype; `name` is the checkpoint's, without ".weight".
        "lm_head" and "embed_tokens" are passed as well: a quantizer may keep them in full precision."""
        ...

    def close(self) -> None: ...


class StacksExperts(Protocol):
    """What a quantizer may offer beside `linear`."""

    def stack(self, layers: list[LinearMethod]) -> StackedMethod | None:
        """The product of these layers, which `linear` made and which have one shape; None where there is
        nothing to win. The layers go on working, on the memory of what is returned."""
        ...


class WeightSizes(Protocol):
    """What a quantizer's *parameters* (its `config_type`) should say, so that memory is counted before
    anything is loaded, where torch is not imported. A quantizer without it is counted in full precision."""

    def bytes_per_parameter(self, name: str, item: int) -> float | None:
        """Bytes that one parameter takes in what `linear` keeps, scales and padding included. `name` is
        "layers" for the linear layers of the decoder, or "lm_head"; `item`: bytes of the compute dtype.
        None: the tensor that `linear` is given is kept (a tied head then costs nothing)."""
        ...
