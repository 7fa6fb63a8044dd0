"""The built-in quantizers: their conformance, and int8 on the model that is really trained."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bien.core.providers import Context
from bien.core.quantization.quantizer import Quantizer
from bien.core.testing.quantizer import QuantizerSuite
from bien.plugins.quantizers import int8, none


class TestNone(QuantizerSuite):
    dtypes = ("float32", "float64", "bfloat16")

    def build(self) -> Quantizer:
        return none.make(none.NoneConfig(), Context())


class TestInt8(QuantizerSuite):
    tolerance = 0.02
    dtypes = ("float32", "float64", "bfloat16")

    def build(self) -> Quantizer:
        return int8.make(int8.Int8Config(), Context())


class TestInt8WithHead(TestInt8):
    def build(self) -> Quantizer:
        return int8.make(int8.Int8Config(head=True), Context())


def test_int8_is_the_integer_product() -> None:
    """Weights and inputs that int8 holds exactly give the exact product."""
    weight = torch.randint(-127, 128, (24, 64)).double()
    weight[:, 0] = 127
    x = torch.randint(-127, 128, (5, 64)).double()
    x[:, 0] = -127
    layer = int8.make(int8.Int8Config(), Context()).linear("layer", weight, None)
    assert torch.allclose(layer(x), x @ weight.T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("head", [False, True])
def test_int8_keeps_the_head_unless_told(head: bool) -> None:
    weight, x = torch.randn(32, 64), torch.randn(3, 64)
    made = int8.make(int8.Int8Config(head=head), Context()).linear("lm_head", weight, None)
    assert torch.equal(made(x), torch.nn.functional.linear(x, weight)) is not head


def test_providers_are_torch_free() -> None:
    code = (
        "import sys; from bien.plugins.quantizers import int8, none; "
        "from bien.plugins.parallel import single; "
        "from bien.plugins.executors import torch as t; "
        "[p.bien_providers() for p in (int8, none, single, t)]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
