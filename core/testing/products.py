"""`ProductLaws`: the part of `KernelsSuite` about quantized products, and the hands of both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bien.core.executors.pools import DTYPES
from bien.core.kernels.base import Kernels
from bien.core.quantization.quantizer import LinearMethod

SHAPES = [(33, 7), (96, 40), (7, 33), (130, 17), (4, 1), (2, 3)]  # of int8 weights: inputs, outputs
TOKENS = (0, 1, 2, 3, 5, 8, 13, 16, 31, 100)


class ProductLaws:
    """Errors of the formats count by the norm, relative to those of inputs and weights."""

    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16")
    tolerance = 32.0
    int8_tolerance = 0.01
    int4_tolerance = 0.01

    def build(self) -> Kernels:
        raise NotImplementedError

    def test_int8_of_whole_levels(self) -> None:
        """Inputs that int8 holds exactly give the exact product."""
        kernels = self.build()
        for dtype, (inputs, outputs) in self.each(SHAPES):
            levels, scale, bias = int8_weights(inputs, outputs, dtype)
            weight = scale.double()[:, None] * levels.double()
            for b in (None, bias):
                layer = kernels.int8_linear(levels, scale, b)
                for tokens in TOKENS:
                    x = torch.randint(-127, 128, (tokens, inputs), generator=seeded(tokens)).to(DTYPES[dtype])
                    x[:, 0] = 127
                    exact = x.double() @ weight.T + (0 if b is None else b.double())
                    self.near(layer(x), exact, f"int8 product of {tokens} x {inputs} x {outputs}", dtype)

    def test_int8_rounds_each_token(self) -> None:
        """To the nearest level of a scale of its own, tokens of very different size among them."""
        kernels = self.build()
        for dtype, (inputs, outputs) in self.each(SHAPES):
            levels, scale, bias = int8_weights(inputs, outputs, dtype)
            weight = scale.double()[:, None] * levels.double()
            x = normal(dtype, 40, inputs) * torch.logspace(-3, 3, 40)[:, None].to(DTYPES[dtype])
            x[5] = 0
            found = kernels.int8_linear(levels, scale, bias)(x)
            assert torch.equal(found[5], bias), "a token of zeros gives more than the bias"
            none = torch.zeros_like(bias)
            found = kernels.int8_linear(levels, scale, None)(x)
            self._coarse(found, x, weight, none, self.int8_tolerance, f"int8 product of {inputs} x {outputs}")

    def test_int4(self) -> None:
        """Groups of every size, outputs of any number, with and without bias."""
        kernels = self.build()
        for dtype, group, outputs in self.each((32, 16, 64, 128), (7, 1, 16, 33, 100)):
            levels, scale, offset, bias = int4_weights(3 * group, outputs, group, dtype)
            weight = dense(levels, scale, offset)
            for b in (None, bias):
                layer = kernels.int4_linear(levels, scale, offset, b)
                for tokens in TOKENS:
                    x = normal(dtype, tokens, 3 * group)
                    what = f"int4 product of {tokens} x {3 * group} x {outputs}, group {group}"
                    other = torch.zeros_like(bias) if b is None else b
                    self._coarse(layer(x), x, weight, other, self.int4_tolerance, what)

    def test_int4_groups_of_inputs_keep_their_precision(self) -> None:
        """A group of x that is small beside the others, and the only one with weights."""
        kernels = self.build()
        for dtype, group in self.each((32, 16, 64, 128)):
            levels, scale, offset, bias = int4_weights(3 * group, 19, group, dtype)
            scale[:, 1:], offset[:, 1:] = 0, 0
            x = normal(dtype, 20, 3 * group)
            x[:, group:] *= 1000
            found = kernels.int4_linear(levels, scale, offset, None)(x)
            x[:, group:] = 0
            what = f"int4 product with large groups beside, group {group}"
            weight, none = dense(levels, scale, offset), torch.zeros_like(bias)
            self._coarse(found, x, weight, none, self.int4_tolerance, what)

    def test_int4_of_constant_groups(self) -> None:
        """A scale of zero, or levels of zero: the offset alone, times the sum of the inputs."""
        kernels = self.build()
        for dtype, group in self.each((32, 16, 64, 128)):
            levels, scale, offset, bias = int4_weights(2 * group, 19, group, dtype)
            levels[:9], scale[9:] = 0, 0
            x = normal(dtype, 20, 2 * group)
            found = kernels.int4_linear(levels, scale, offset, bias)(x)
            weight = dense(levels, scale, offset)
            self._coarse(found, x, weight, bias, self.int4_tolerance, f"constant weights, group {group}")

    def test_products_keep_shape_and_dtype(self) -> None:
        for dtype, name, layer, inputs, outputs in self._products(self.build()):
            assert layer.out_features == outputs, name
            for lead in ((), (1,), (7,), (2, 3), (0,), (2, 0)):
                x = normal(dtype, *lead, inputs)
                y = layer(x)
                assert y.shape == (*lead, outputs), f"{name}: {tuple(x.shape)} gives {tuple(y.shape)}"
                assert y.dtype == x.dtype, f"{name}: {x.dtype} gives {y.dtype}"

    def test_products_take_any_layout(self) -> None:
        """Slices and transposed tensors; inputs stay, and a token does not depend on the others."""
        for dtype, name, layer, inputs, _ in self._products(self.build()):
            x = normal(dtype, 9, inputs)
            x[4] *= 1000
            before, want = x.clone(), layer(x).double()
            assert torch.equal(x, before), f"{name} changes its input"
            wide = torch.cat([x, x], 1)
            for other in (x, wide[:, inputs:], x.t().contiguous().t(), x[:, None].expand(9, 2, inputs)[:, 1]):
                self.near(layer(other), want, f"{name} of another layout")
            repeated = x[2].expand(5, inputs)
            self.near(layer(repeated), want[2].expand(5, -1), f"{name} of one token five times")
            turned = layer(x.flip(0)).flip(0)
            for i in range(9):
                self.near(turned[i], want[i], f"{name} of tokens in another order")
                self.near(layer(x[i : i + 1])[0], want[i], f"{name} of a token alone")

    def test_products_leave_weights_alone(self) -> None:
        """Weights may be mapped from a file."""
        kernels = self.build()
        given = (*int8_weights(96, 40, "float32"), *int4_weights(96, 40, 32, "float32"))
        before = [t.clone() for t in given]
        kernels.int8_linear(*given[:3])(normal("float32", 3, 96))
        kernels.int4_linear(*given[3:])(normal("float32", 3, 96))
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "weights have changed"

    # -- hands

    def each(self, *choices: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """(dtype, one of each of the choices): all of them in the first dtype, in others first and last."""
        for dtype in self.dtypes:
            few = dtype != self.dtypes[0]
            yield from itertools.product((dtype,), *((c[0], c[-1]) if few else c for c in choices))

    def near(self, found: Tensor, exact: Tensor, what: str, dtype: str = "", floor: float = 0.0) -> None:
        """`found` has the shape of `exact`, `dtype` if that is given, and its values to the tolerance of its
        dtype. `floor`: differences that do not count."""
        assert found.shape == exact.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(exact.shape)}"
        if dtype:
            assert found.dtype == DTYPES[dtype], f"{what} in {dtype} gives {found.dtype}"
        if not exact.numel():
            return
        worst, most = float((found.double() - exact).abs().max()), float(exact.abs().max())
        bound = max(floor, self.tolerance * torch.finfo(found.dtype).eps * most)
        assert worst <= bound, f"{what} in {found.dtype}: error {worst:.2g} is above {bound:.2g}"

    def _coarse(
        self, found: Tensor, x: Tensor, weight: Tensor, bias: Tensor, share: float, what: str
    ) -> None:
        # Relative to the sizes of x and the weight, since what they give may cancel.
        assert found.dtype == x.dtype, f"{what}: {x.dtype} gives {found.dtype}"
        exact = x.double() @ weight.T
        error = (found.double() - bias.double() - exact).norm(dim=-1)
        rounding = torch.finfo(found.dtype).eps
        allowed = (share + 4 * rounding) * x.double().norm(
            dim=-1
        ) * weight.norm() + 4 * rounding * bias.double().norm()
        assert found.shape == exact.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(exact.shape)}"
        over = [i for i in range(len(x)) if not float(error[i]) <= float(allowed[i])]
        if over:
            i = over[0]
            text = f"error {float(error[i]):.2g} of token {i} is above {float(allowed[i]):.2g}"
            raise AssertionError(f"{what} in {found.dtype}: {text}")

    def _products(self, kernels: Kernels) -> Iterator[tuple[str, str, LinearMethod, int, int]]:
        """(dtype, name, method, inputs, outputs)"""
        for dtype in self.dtypes:
            levels, scale, bias = int8_weights(33, 7, dtype)
            yield dtype, "int8 product", kernels.int8_linear(levels, scale, bias), 33, 7
            levels, scale, offset, bias = int4_weights(96, 19, 32, dtype)
            yield dtype, "int4 product", kernels.int4_linear(levels, scale, offset, bias), 96, 19


def normal(dtype: str, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(DTYPES[dtype])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def int8_weights(inputs: int, outputs: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """(levels, scale, bias); the scale as quantizers give it, in float32 at least."""
    levels = torch.randint(-127, 128, (outputs, inputs), generator=seeded(inputs)).to(torch.int8)
    levels[:, 0] = 127
    scale = torch.rand(outputs, generator=seeded(outputs)) + 0.01
    return levels, scale.double() if dtype == "float64" else scale, normal(dtype, outputs)


def int4_weights(inputs: int, outputs: int, group: int, dtype: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(levels, scale, offset, bias): weights around zero, as they are, with every level in use."""
    levels = torch.randint(0, 16, (outputs, inputs), generator=seeded(inputs)).to(torch.uint8)
    shape = outputs, inputs // group
    scale = (torch.rand(shape, generator=seeded(outputs)) + 0.1) / 8
    # Values that float16 and bfloat16 hold.
    scale = scale.bfloat16().to(DTYPES[dtype])
    offset = (-8 * scale.float() + torch.rand(shape, generator=seeded(5)) / 4).bfloat16().to(DTYPES[dtype])
    return levels, scale, offset, normal(dtype, outputs)


def dense(levels: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """The weights [out, in] in float64."""
    grouped = levels.double().view(*scale.shape, -1)
    return (grouped * scale.double()[..., None] + offset.double()[..., None]).flatten(1)
