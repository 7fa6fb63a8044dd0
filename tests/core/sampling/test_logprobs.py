from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bien.core.logprobs import TokenLogprobs
from bien.core.sampling.logprobs import token_logprobs

ROWS = [[0.0, 1.0, 2.0, -math.inf], [3.0, 1.0, 1.0, 0.0], [-1.0, 5.0, 4.0, 4.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 3, 9])
def test_against_plain_loops(dtype: torch.dtype, top: int) -> None:
    tokens = [0, 1, 2]
    found = token_logprobs(torch.tensor(ROWS, dtype=dtype), np.array(tokens, np.int32), top)
    exact = [[x - math.log(sum(map(math.exp, row))) for x in row] for row in ROWS]
    chosen = memoryview(found.chosen).cast("f").tolist()
    assert chosen == pytest.approx([row[t] for row, t in zip(exact, tokens, strict=True)], abs=1e-6)
    width = min(top, 4)
    assert found.top == width
    ids = np.frombuffer(found.ids, "<u4").reshape(3, width)
    values = np.frombuffer(found.values, "<f4").reshape(3, width)
    for row, best, value in zip(exact, ids.tolist(), values.tolist(), strict=True):
        assert len(set(best)) == width
        assert value == pytest.approx(sorted(row, reverse=True)[:width], abs=1e-6)
        assert value == pytest.approx([row[i] for i in best], abs=1e-6)


@given(st.integers(0, 4), st.integers(0, 5))
def test_a_cut_keeps_the_first_tokens(top: int, count: int) -> None:
    logits = torch.arange(20, dtype=torch.float64).reshape(4, 5).cos()
    tokens = np.array([3, 1, 4, 1], np.int32)
    n = min(count, 4)
    whole = token_logprobs(logits, tokens, top)
    if n:
        assert whole.first(count) == token_logprobs(logits[:n], tokens[:n], top)
    else:
        assert whole.first(0) == TokenLogprobs(b"", top)
