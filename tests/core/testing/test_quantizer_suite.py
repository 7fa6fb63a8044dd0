from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bien.core.providers import Context
from bien.core.testing.quantizer import QuantizerSuite
from bien.core.testing.suites import failures
from bien.plugins.quantizers import int8, none


class Int8Linear:
    """Weights per output channel, activations in full precision: conforms at 0.02."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.scale = self.scales(weight)
        self.weight = (weight / self.scale).round().clamp(-127, 127)
        self.bias = bias
        self.out_features = len(weight)

    def scales(self, weight: Tensor) -> Tensor:
        return weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127

    def product(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).T.to(x.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias


class ScalesOfInputs(Int8Linear):
    def scales(self, weight: Tensor) -> Tensor:
        return weight.abs().amax(0, keepdim=True) / 127


class OneScale(Int8Linear):
    def scales(self, weight: Tensor) -> Tensor:
        return weight.abs().max() / 127


class ScalesAppliedToInputs(Int8Linear):
    """Divides rows by their scales, multiplies columns."""

    def product(self, x: Tensor) -> Tensor:
        scale = self.scale[:, 0].repeat(3)[: x.shape[-1]]
        return x @ (self.weight * scale).T.to(x.dtype)


class Transposed(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).transpose(0, -1)


class ChangesDtype(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).double()


class IgnoresBias(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class QuantizesTheBatch(Int8Linear):
    """One activation scale for all tokens of the step."""

    def product(self, x: Tensor) -> Tensor:
        scale = x.abs().max().clamp(min=1e-12) / 127 if x.numel() else torch.ones(())
        return super().product((x / scale).round() * scale)


class NoScaleFloor(Int8Linear):
    def scales(self, weight: Tensor) -> Tensor:
        return weight.abs().amax(1, keepdim=True) / 127


class InPlace(Int8Linear):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        weight.mul_(2)


class Quantizer:
    def __init__(self, layer: type[Int8Linear], any_config: bool = False) -> None:
        self.layer, self.any_config = layer, any_config

    def matches(self, config: Mapping[str, Any]) -> bool:
        return self.any_config or "quantization_config" not in config

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Int8Linear:
        return self.layer(weight, bias)

    def close(self) -> None:
        pass


CAUGHT = {
    ScalesOfInputs: "every_output_keeps_its_precision",
    OneScale: "every_output_keeps_its_precision",
    ScalesAppliedToInputs: "product",
    Transposed: "shape_and_dtype",
    ChangesDtype: "shape_and_dtype",
    IgnoresBias: "product",
    QuantizesTheBatch: "a_token_does_not_depend_on_its_batch",
    NoScaleFloor: "zeros",
    InPlace: "leaves_its_inputs_alone",
}


def suite(layer: type[Int8Linear], **options: Any) -> type[QuantizerSuite]:
    body = {"build": lambda self: Quantizer(layer, **options), "tolerance": 0.02}
    return type("Suite", (QuantizerSuite,), body)


def test_a_plain_quantizer_conforms() -> None:
    assert failures(suite(Int8Linear)) == []


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda c: c.__name__)
def test_fault_is_caught(fault: type[Int8Linear]) -> None:
    names = [line.split(":")[0] for line in failures(suite(fault))]
    assert f"test_{CAUGHT[fault]}" in names


def test_a_quantizer_that_reads_everything_is_caught() -> None:
    assert [line.split(":")[0] for line in failures(suite(Int8Linear, any_config=True))] == [
        "test_matches_its_checkpoints"
    ]


def test_a_tolerance_below_the_format_is_caught() -> None:
    strict = type("Strict", (suite(Int8Linear),), {"tolerance": 1e-4})
    assert "test_product" in [line.split(":")[0] for line in failures(strict)]


class TestNone(QuantizerSuite):
    dtypes = ("float32", "float64", "bfloat16")

    def build(self) -> Any:
        return built(none)


class TestInt8(QuantizerSuite):
    tolerance = 0.02

    def build(self) -> Any:
        return built(int8)


def built(plugin: Any) -> Any:
    (provider,) = plugin.bien_providers()
    return provider.factory(provider.config_type(), Context())
