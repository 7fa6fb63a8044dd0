"""The delta rule over ragged batches against its definition, one token of one sequence at a time; its decay
against transformers'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bien.core.models.delta_attention import DeltaAttention
from bien.core.models.delta_rule import CHUNK, LONG, delta_rule

HEADS, DIM = 2, 5


def rows_of(counts: list[int], drafts: list[int]) -> Any:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return SimpleNamespace(
        counts=np.array(counts, np.int32), offsets=offsets, keep=np.array(drafts, np.int32) + 1
    )


def inputs(counts: list[int], dtype: torch.dtype, strength: float, per_channel: bool) -> list[Tensor]:
    torch.manual_seed(len(counts) + sum(counts))
    n = sum(counts)
    q, k, v = (torch.randn(n, HEADS, DIM, dtype=torch.float64) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    decay = -strength * torch.rand(n, HEADS, DIM if per_channel else 1, dtype=torch.float64)
    state = torch.randn(len(counts), HEADS, DIM, DIM, dtype=torch.float64)
    return [x.to(dtype) for x in (state, q, k, v, decay, torch.rand(n, HEADS, dtype=torch.float64))]


def defined(args: list[Tensor], counts: list[int], drafts: list[int]) -> tuple[Tensor, Tensor]:
    """S <- S diag(exp(g)); S <- S + b (v - S k) k^T; o = S q."""
    state, q, k, v, decay, rate = (x.double() for x in args)
    mixed, kept, n = torch.zeros_like(v), [], 0
    for i, (count, draft) in enumerate(zip(counts, drafts, strict=True)):
        for t in range(count):
            for h in range(HEADS):
                s = state[i, h] * decay[n, h].exp()
                s = s + rate[n, h] * torch.outer(v[n, h] - s @ k[n, h], k[n, h])
                state[i, h], mixed[n, h] = s, s @ q[n, h]
            n += 1
            if t >= count - draft - 1:
                kept.append(state[i].clone().flatten())
    return mixed, torch.stack(kept)


ROWS = st.lists(
    st.tuples(st.integers(1, 2 * CHUNK + 5), st.integers(0, 20)).map(lambda r: (r[0], min(r[1], r[0] - 1))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(ROWS, st.sampled_from([0.01, 2.0, 60.0]), st.booleans())
def test_any_batch(rows: list[tuple[int, int]], strength: float, per_channel: bool) -> None:
    counts, drafts = [r[0] for r in rows], [r[1] for r in rows]
    args = inputs(counts, torch.float64, strength, per_channel)
    mixed, kept = defined([x.clone() for x in args], counts, drafts)
    found, states = delta_rule(*args, rows_of(counts, drafts))
    torch.testing.assert_close(found, mixed, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(states, kept, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strength", [0.001, 5.0, 400.0])
@pytest.mark.parametrize("count", [LONG, LONG + 1, CHUNK, 8 * CHUNK + 1])
def test_chunks_in_float32(count: int, strength: float) -> None:
    """Sums of log-decays go far below what float32's exponents reach: nothing overflows."""
    args = inputs([count], torch.float32, strength, True)
    mixed, kept = defined([x.clone() for x in args], [count], [0])
    found, states = delta_rule(*args, rows_of([count], [0]))
    assert (found - mixed).abs().max() <= 1e-5 * mixed.abs().max()
    assert (states - kept).abs().max() <= 1e-5 * kept.abs().max()


def test_keys_that_repeat() -> None:
    """The hardest system: every write of a chunk corrects the same entry."""
    count = 3 * CHUNK
    args = inputs([count], torch.float32, 0.0, True)
    args[2][:] = args[2][:1]
    args[5][:] = 1.0
    mixed, kept = defined([x.clone() for x in args], [count], [0])
    found, states = delta_rule(*args, rows_of([count], [0]))
    assert (found - mixed).abs().max() <= 1e-4 * mixed.abs().max()
    assert (states - kept).abs().max() <= 1e-4 * kept.abs().max()


@pytest.mark.parametrize("bound", [None, -3.5])
def test_decay_against_the_forget_gate_of_transformers(bound: float | None) -> None:
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    torch.manual_seed(0)
    config = SimpleNamespace(linear_head_dim=8, linear_num_heads=3, hidden_size=16, linear_lower_bound=bound)
    gate = Glm5NextTextForgetGate(config)
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    own = DeltaAttention.__new__(DeltaAttention)
    own.heads, own.dim, own.bound, own.wide = 3, 8, bound, torch.float32
    own.low, own.decay = gate.f_a_proj.weight, gate.f_b_proj.weight
    own.speed, own.bias = gate.A_log.exp()[:, None], gate.dt_bias
    x = torch.randn(1, 20, 16) * 3
    with torch.inference_mode():
        torch.testing.assert_close(own._decay(x[0]), gate(x)[0], rtol=1e-5, atol=1e-5)
