"""Products in full precision: rows are padded where that is faster, and nobody sees it."""

from __future__ import annotations

import pytest
import torch

from bien.plugins.quantizers._rows import FullLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_rows_is_the_plain_product(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype) if biased else None
    linear = FullLinear(weight, bias)
    for rows in (0, 1, 6, 7, 8, 15, 16, 17):
        x = torch.randn(rows, 24, dtype=dtype)
        expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        out = linear(x)
        assert out.shape == (rows, 40)
        torch.testing.assert_close(
            out.double(),
            expected,
            rtol=0.05 if dtype is torch.bfloat16 else 1e-4,
            atol=1e-4 if dtype is not torch.bfloat16 else 0.2,
        )
