"""The built-in kernels against their suite, and native ones against torch's bits where they promise them."""

from __future__ import annotations

import os
import shutil
import unittest
from typing import Any

import pytest
import torch

from bien.core.kernels.base import Kernels
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.providers import Context
from bien.core.testing.kernels import LONG, MIXED, KernelsSuite
from bien.core.testing.paged import PagedBatch
from bien.core.testing.products import int4_weights, int8_weights, normal
from bien.plugins.kernels import native
from bien.plugins.kernels import torch as plain
from bien.plugins.kernels.native import compile as compiling


def native_kernels(threads: int = 1) -> Any:
    """SkipTest where the machine lacks what they need."""
    lacking = [flag for flag in compiling.NEEDED if flag not in compiling.processor_flags()]
    if lacking:
        raise unittest.SkipTest(f"the processor lacks {', '.join(lacking)}")
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise unittest.SkipTest(f"there is no compiler {compiler}")
    provider = next(p for p in native.bien_providers() if p.name == "native")
    return provider.factory(provider.config_type(), Context(threads=threads))


class TestTorch(KernelsSuite):
    int4_tolerance = 1e-6

    def build(self) -> Kernels:
        (provider,) = plain.bien_providers()
        return provider.factory(provider.config_type(), Context())  # type: ignore[no-any-return]


class TestNative(KernelsSuite):
    batch_tolerance = 0.0

    def build(self) -> Kernels:
        return native_kernels()  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True])
def test_int8_products_have_the_bits_of_torch(bias: bool) -> None:
    ours, theirs = native_kernels(), TorchKernels()
    for inputs, outputs in ((33, 7), (576, 160), (1536, 49), (64, 1000)):
        levels, scale, b = int8_weights(inputs, outputs, "float32")
        made = [kernels.int8_linear(levels, scale, b if bias else None) for kernels in (ours, theirs)]
        for tokens in (1, 2, 7, 8, 13, 40, 97, 200):
            x = normal("float32", tokens, inputs, seed=tokens) * 3
            x[:, 0] *= 50
            x[tokens // 2] *= 1e-30
            assert torch.equal(made[0](x), made[1](x)), f"{tokens} x {inputs} x {outputs}"


def test_int8_products_at_the_edge_of_their_range() -> None:
    """The largest sums that levels can give, of either sign, do not overflow."""
    levels = torch.full((17, 32768), 127, dtype=torch.int8)
    levels[::2] = -127
    x = torch.ones(3, 32768)
    x[1] = -1
    found = native_kernels().int8_linear(levels, torch.ones(17), None)(x)
    exact = x.double() @ levels.double().T
    assert torch.allclose(found.double(), exact, rtol=1e-6, atol=0)


def test_threads_change_no_bit() -> None:
    batch = PagedBatch(MIXED + LONG, d=64)
    x = normal("float32", 200, 192)
    angles = torch.polar(torch.ones(200, 1, 48), torch.rand(200, 1, 48))
    said = []
    for threads in (1, 2, 3):
        kernels = native_kernels(threads)
        turned = x.clone().view(200, 2, 96)
        kernels.rope(turned, angles)
        kernels.write_kv(batch.pool.flat[0], batch.rows(), batch.new_kv(0))
        said.append(
            [
                kernels.paged_attention(batch.query, batch.rows(), 1, 0.2),
                kernels.int8_linear(*int8_weights(192, 100, "float32"))(x),
                kernels.int4_linear(*int4_weights(192, 100, 64, "float32"))(x),
                *kernels.add_rms_norm(x, x, x[0].clone(), 1e-5),
                kernels.rms_norm(x, x[0].clone(), 1e-5),
                kernels.silu_mul(x),
                turned,
                batch.pool.data.clone(),
            ]
        )
    native_kernels(1)
    for other in said[1:]:
        assert all(torch.equal(a, b) for a, b in zip(said[0], other, strict=True))


def test_what_is_not_float32_is_left_to_torch() -> None:
    ours, theirs = native_kernels(), TorchKernels()
    for dtype in ("float64", "bfloat16"):
        batch, x = PagedBatch(MIXED, dtype=dtype), normal(dtype, 5, 64)
        pairs = [
            [kernels.paged_attention(batch.query, batch.rows(), 1, 0.2) for kernels in (ours, theirs)],
            [kernels.rms_norm(x, x[0], 1e-5) for kernels in (ours, theirs)],
            [kernels.silu_mul(x) for kernels in (ours, theirs)],
            [kernels.int4_linear(*int4_weights(64, 9, 32, dtype))(x) for kernels in (ours, theirs)],
        ]
        assert all(torch.equal(a, b) for a, b in pairs), dtype
