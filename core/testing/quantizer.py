"""Conformance of quantizers. Subclass `QuantizerSuite` with `build()` and the tolerance of the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bien.core.quantization.quantizer import Quantizer

NAME = "model.layers.0.mlp.down_proj"


class QuantizerSuite:
    """What models rely on. Errors are relative to the full-precision product, by the norm."""

    tolerance = 1e-6  # of one output row or column; int8 per channel: about 0.02
    dtypes: tuple[str, ...] = ("float32",)
    reads: tuple[Mapping[str, Any], ...] = ({},)  # configs of checkpoints that it can read
    refuses: tuple[Mapping[str, Any], ...] = ({"quantization_config": {"quant_method": "no-such-format"}},)
    in_features, out_features = 96, 40  # multiples of the format's block, and not equal

    def build(self) -> Quantizer:
        """A fresh quantizer."""
        raise NotImplementedError

    def test_matches_its_checkpoints(self) -> None:
        quantizer = self.build()
        for config in self.reads:
            assert quantizer.matches(config), f"does not match {dict(config)}"
        for config in self.refuses:
            assert not quantizer.matches(config), f"matches {dict(config)}"

    def test_shape_and_dtype(self) -> None:
        for name in self.dtypes:
            weight, bias = self._parameters(name)
            layer = self.build().linear(NAME, weight, bias)
            assert layer.out_features == self.out_features
            for lead in ((), (1,), (7,), (2, 3), (0,)):
                x = torch.randn(*lead, self.in_features).to(weight.dtype)
                y = layer(x)
                assert y.shape == (*lead, self.out_features), f"{tuple(x.shape)} gives {tuple(y.shape)}"
                assert y.dtype == x.dtype, f"{x.dtype} gives {y.dtype}"

    def test_product(self) -> None:
        for name in self.dtypes:
            weight, bias = self._parameters(name)
            x = self._input(name)
            for b in (None, bias):
                exact = self._exact(x, weight, b)
                self._near(self.build().linear(NAME, weight, b)(x), exact, -1, name)

    def test_every_output_keeps_its_precision(self) -> None:
        """Output features of very different size: one scale for all of them would lose the small ones."""
        weight, _ = self._parameters(self.dtypes[0])
        weight = weight * torch.logspace(-3, 3, self.out_features, dtype=weight.dtype)[:, None]
        x = self._input(self.dtypes[0])
        self._near(
            self.build().linear(NAME, weight, None)(x), self._exact(x, weight, None), 0, self.dtypes[0]
        )

    def test_every_token_keeps_its_precision(self) -> None:
        """Tokens of very different size in one batch."""
        weight, _ = self._parameters(self.dtypes[0])
        x = self._input(self.dtypes[0])
        x = x * torch.logspace(-3, 3, len(x), dtype=x.dtype)[:, None]
        self._near(
            self.build().linear(NAME, weight, None)(x), self._exact(x, weight, None), -1, self.dtypes[0]
        )

    def test_a_token_does_not_depend_on_its_batch(self) -> None:
        weight, bias = self._parameters(self.dtypes[0])
        x = self._input(self.dtypes[0])
        x[0] *= 1000
        layer = self.build().linear(NAME, weight, bias)
        together = layer(x)
        for i in range(len(x)):
            alone = layer(x[i : i + 1])[0]
            bound = 1e-5 * float(together[i].abs().max())
            assert torch.allclose(alone, together[i], rtol=0, atol=bound), f"token {i} differs when alone"

    def test_experts_in_one_product(self) -> None:
        """Quantizers that can stack layers: rows of some experts, of all, of none; the layers go on."""
        for name in self.dtypes:
            for with_bias in (False, True):
                quantizer = self.build()
                weights, bias = zip(*[self._parameters(name, seed) for seed in range(5)], strict=True)
                given = bias if with_bias else [None] * 5
                layers = [quantizer.linear(NAME, w, b) for w, b in zip(weights, given, strict=True)]
                stack = getattr(quantizer, "stack", None)
                product = stack(layers) if stack else None
                if product is None:
                    continue
                for counts in ((0, 4, 0, 7, 0), (2, 2, 2, 3, 2), (11, 0, 0, 0, 0), (0, 0, 0, 0, 0)):
                    expert = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
                    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
                    x = self._input(name)[: len(expert)]
                    found = product(x, ends, expert)
                    assert found.shape == (len(x), self.out_features) and found.dtype == x.dtype
                    if len(x):
                        one = [layers[e](x[i : i + 1])[0] for i, e in enumerate(expert.tolist())]
                        exact = [
                            self._exact(x[i], weights[e], given[e]) for i, e in enumerate(expert.tolist())
                        ]
                        self._near(found, torch.stack(exact), -1, name)
                        self._near(torch.stack(one), torch.stack(exact), -1, name)

    def test_zeros(self) -> None:
        weight, bias = self._parameters(self.dtypes[0])
        weight[3] = 0
        layer = self.build().linear(NAME, weight, bias)
        assert torch.equal(layer(torch.zeros(2, self.in_features, dtype=weight.dtype)), bias.expand(2, -1))
        y = layer(self._input(self.dtypes[0]))
        assert bool(y.isfinite().all()), "a zero row of the weight gives infinities"
        assert torch.equal(y[:, 3], bias[3].expand(len(y))), (
            "a zero row of the weight gives more than the bias"
        )

    def test_leaves_its_inputs_alone(self) -> None:
        """Weights may be mapped from a file that other workers read."""
        weight, bias = self._parameters(self.dtypes[0])
        x = self._input(self.dtypes[0])
        before = [t.clone() for t in (weight, bias, x)]
        layer = self.build().linear(NAME, weight, bias)
        first = layer(x).clone()
        for tensor, old in zip((weight, bias, x), before, strict=True):
            assert torch.equal(tensor, old)
        assert torch.equal(layer(x), first), "the same input gives another product"

    def test_takes_embeddings_and_head(self) -> None:
        weight, _ = self._parameters(self.dtypes[0])
        x = self._input(self.dtypes[0])
        quantizer = self.build()
        for name in ("lm_head", "embed_tokens"):
            self._near(
                quantizer.linear(name, weight, None)(x), self._exact(x, weight, None), -1, self.dtypes[0]
            )
        quantizer.close()

    def _parameters(self, dtype: str, seed: int = 1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(torch, dtype)
        weight = torch.randn(self.out_features, self.in_features, generator=generator)
        return weight.to(kind), torch.randn(self.out_features, generator=generator).to(kind)

    def _input(self, dtype: str) -> Tensor:
        x = torch.randn(11, self.in_features, generator=torch.Generator().manual_seed(2))
        return x.to(getattr(torch, dtype))

    def _exact(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.double() @ weight.double().T
        return y if bias is None else y + bias.double()

    def _near(self, found: Tensor, exact: Tensor, dim: int, dtype: str) -> None:
        rounding = 4 * torch.finfo(getattr(torch, dtype)).eps
        error = (found.double() - exact).norm(dim=dim) / exact.norm(dim=dim)
        what = "token" if dim == -1 else "output feature"
        worst, bound = float(error.max()), max(self.tolerance, rounding)
        assert worst <= bound, f"relative error {worst:.2g} of a {what} in {dtype} is above {bound:.2g}"
