"""The built-in quantizers: their conformance, and their cost on the model that is really trained."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import unittest
from typing import Any

import pytest
import torch
from torch import Tensor

from bien.core.errors import ModelError
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.models.fetch import resolve_model
from bien.core.providers import Context
from bien.core.quantization.quantizer import LinearMethod, Quantizer
from bien.core.testing.quantizer import QuantizerSuite
from bien.plugins.quantizers import int4, int8, none
from bien.plugins.quantizers.int4 import Int4Config
from bien.plugins.quantizers.int4.linear import int4_groups
from bien.plugins.quantizers.int8 import Int8Config
from tests.core.executors.driver import Driver
from tests.plugins.test_kernels import native_kernels


def quantizer(config: Int8Config | Int4Config, kernels: Any = None) -> Quantizer:
    plugin = int4 if isinstance(config, Int4Config) else int8
    return plugin.make(config, Context(parts={"kernels": kernels or TorchKernels()}))  # type: ignore[arg-type]


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


class TestInt8Native(TestInt8):
    def build(self) -> Quantizer:
        return quantizer(Int8Config(head=True), native_kernels())


class TestInt4(QuantizerSuite):
    """Rounding costs 8 to 12 % of a weight (see below); of one output over eleven tokens, which is what
    the suite looks at, twice that."""

    tolerance = 0.2
    dtypes = ("float32", "float64", "bfloat16")
    config = Int4Config(head="int4")
    in_features = 256  # a multiple of every group

    def build(self) -> Quantizer:
        return quantizer(self.config)


class TestInt4InGroupsOf64(TestInt4):
    tolerance = 0.24
    config = Int4Config(group=64)


class TestInt4InGroupsOf128(TestInt4):
    tolerance = 0.3
    config = Int4Config(group=128, head="none")


class TestInt4Native(TestInt4):
    def build(self) -> Quantizer:
        return quantizer(self.config, native_kernels())


class TestInt4NativeInGroupsOf128(TestInt4InGroupsOf128):
    def build(self) -> Quantizer:
        return quantizer(self.config, native_kernels())


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_has_the_same_bits_in_native_kernels(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(70, 144).to(dtype), torch.randn(70).to(dtype)
    made = [
        quantizer(Int8Config(), kernels).linear("layer", weight, bias)
        for kernels in (native_kernels(), TorchKernels())
    ]
    for tokens in (1, 5, 30):
        x = torch.randn(tokens, 144).to(dtype)
        assert torch.equal(made[0](x), made[1](x))


class Given(TorchKernels):
    """Notes what it is given."""

    def int4_linear(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> LinearMethod:
        self.levels, self.scale, self.offset = levels, scale, offset
        return super().int4_linear(levels, scale, offset, bias)


@pytest.mark.parametrize(
    "group, width, fits",
    [(32, 96, 32), (64, 96, 32), (128, 192, 64), (128, 256, 128), (32, 80, 16), (64, 16, 16)],
)
def test_int4_takes_the_largest_group_that_fits(group: Any, width: int, fits: int) -> None:
    kernels = Given()
    quantizer(Int4Config(group=group), kernels).linear("layer", torch.randn(3, width), None)
    assert kernels.scale.shape == kernels.offset.shape == (3, width // fits)


def test_int4_refuses_a_width_that_no_group_divides() -> None:
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.up_proj' has 40 inputs.*multiple of 16"):
        quantizer(Int4Config()).linear("model.layers.0.mlp.up_proj", torch.randn(8, 40), None)


def test_int4_of_groups_that_four_bits_hold_exactly() -> None:
    """Sixteen levels between any two numbers that float16 holds: Q4_1 checkpoints come back as they are."""
    levels = torch.randint(0, 16, (9, 4, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    scale, offset = torch.rand(9, 4, 1).half().float() / 8, -torch.rand(9, 4, 1).half().float()
    weight = (scale * levels + offset).flatten(1)
    found = int4_groups(weight, 32)
    assert torch.equal(found[0], levels.flatten(1).to(torch.uint8))
    again = found[1][..., None] * found[0].view(9, 4, 32) + found[2][..., None]
    assert torch.allclose(again.flatten(1), weight, rtol=0, atol=1e-4)
    constant, scale, offset = int4_groups(torch.full((2, 64), 0.25), 32)
    assert not constant.any() and not scale.any() and bool((offset == 0.25).all())


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("group, bound", [(32, 0.09), (64, 0.11), (128, 0.12)])
def test_int4_rounds_to_the_nearest_of_sixteen_levels(group: int, bound: float, size: float) -> None:
    """The range of a group of normal values is 4 to 5.3 times their size; rounding into 15 steps of it adds
    noise of a step / sqrt(12)."""
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(1)) * size
    levels, scale, offset = int4_groups(weight, group)
    found = scale[..., None] * levels.view(40, -1, group) + offset[..., None]
    noise = (found.flatten(1) - weight).norm(dim=1) / weight.norm(dim=1)
    assert bound / 1.5 < float(noise.max()) < bound


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "config",
    [Int4Config(), Int4Config(group=64), Int4Config(group=128), Int8Config(), Int8Config(head=True)],
    ids=lambda c: repr(c)[:30],
)
def test_layers_take_the_memory_that_was_promised(config: Any, native: bool) -> None:
    kernels = native_kernels() if native else TorchKernels()
    weight = torch.randn(1000, 1024)
    for name, kind in (("model.layers.0.mlp.up_proj", "layers"), ("lm_head", "lm_head")):
        promised = config.bytes_per_parameter(kind, 4)
        layer = quantizer(config, kernels).linear(name, weight, None)
        tensors = [t for t in vars(layer).values() if isinstance(t, Tensor)]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        if promised is None:
            assert set(held) == {weight.untyped_storage().data_ptr()}
        else:
            assert sum(held.values()) == pytest.approx(promised * weight.numel(), rel=0.03)


COSTS = {  # quantizer: KL divergence at most, share of equal best tokens at least
    "int8": (Int8Config(), 0.05, 0.85),
    "int8, head too": (Int8Config(head=True), 0.07, 0.8),
    "int4 of 32, full head": (Int4Config(head="none"), 0.006, 0.93),
    "int4 of 32, int8 head": (Int4Config(), 0.025, 0.88),
    "int4 of 32, int4 head": (Int4Config(head="int4"), 0.09, 0.8),
    "int4 of 64": (Int4Config(group=64), 0.5, 0.6),
    "int4 of 128": (Int4Config(group=128), 0.65, 0.55),
}


@pytest.fixture(scope="module")
def trained() -> Any:
    """distribution(parts): log-probabilities of SmolLM2 behind 320 tokens of source code, [320, V]."""
    from tokenizers import Tokenizer

    folder = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(inspect.getsource(argparse)[:4000]).ids[:353]

    def distribution(**parts: Any) -> Tensor:
        driver = Driver(folder, blocks=60, block_tokens=16, max_context=512, **parts)
        slot = driver.add(tokens[:33])
        driver.step({slot: 33}, {slot: tokens[33:]})  # the text as drafts: logits of all of it
        return torch.from_numpy(driver.logits[slot][:-1]).log_softmax(-1)

    return distribution


@pytest.fixture(scope="module")
def full(trained: Any) -> Any:
    return trained()


@pytest.mark.slow
@pytest.mark.parametrize("cost", COSTS)
def test_cost_on_the_trained_model(cost: str, trained: Any, full: Tensor) -> None:
    """Source code predicted in the format against full precision, with native kernels where they run."""
    config, most, least = COSTS[cost]
    try:
        kernels = native_kernels()
    except unittest.SkipTest:
        kernels = TorchKernels()
    found = trained(quantizer=quantizer(config, kernels), kernels=kernels)
    divergence = float((full.exp() * (full - found)).sum(-1).mean())
    agreement = float((full.argmax(-1) == found.argmax(-1)).double().mean())
    print(f"{cost}: KL {divergence:.4f}, agreement {agreement:.3f}")
    assert 1e-4 < divergence < most
    assert agreement > least


def test_providers_are_torch_free() -> None:
    code = (
        "import sys; from bien.plugins.quantizers import int4, int8, none; "
        "from bien.plugins.parallel import single; "
        "from bien.plugins.executors import torch as t; "
        "from bien.plugins.kernels import native as n, torch as k; "
        "[p.bien_providers() for p in (int4, int8, none, single, t, k, n)]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
