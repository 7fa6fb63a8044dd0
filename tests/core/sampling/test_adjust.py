from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.request import SamplingParams
from bien.core.sampling.adjust import Adjustment
from bien.core.sampling.sampler import draw, sample_rows

VOCAB = 7
LOGITS = st.lists(
    st.sampled_from([-math.inf, -2.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=VOCAB, max_size=VOCAB
).filter(lambda row: max(row) > -math.inf)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@st.composite
def parameters(draw: Any) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.4, 1.0, 1.7])),
        top_p=draw(st.sampled_from([0.5, 0.9, 1.0])),
        top_k=draw(st.sampled_from([0, 2, 5])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3, 2.0])),
        frequency_penalty=draw(st.sampled_from([-1.0, 0.0, 0.7])),
        presence_penalty=draw(st.sampled_from([-2.0, 0.0, 0.4])),
        logit_bias=tuple(
            draw(st.dictionaries(st.integers(0, VOCAB + 2), st.floats(-5, 5), max_size=3)).items()
        ),
        min_tokens=draw(st.integers(0, 4)),
        max_tokens=9,
    )


def law(
    row: list[float], s: SamplingParams, ends: set[int], prompt: list[int], output: list[int]
) -> list[float]:
    """The whole law in plain words, token by token."""
    adjusted, times, bias = [], Counter(output), dict(s.logit_bias)
    for token, x in enumerate(row):
        if token in prompt or token in output:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        if token in output:
            x -= s.frequency_penalty * times[token] + s.presence_penalty
        adjusted.append(x + bias.get(token, 0.0))
    if len(output) < s.min_tokens:
        masked = [-math.inf if token in ends else x for token, x in enumerate(adjusted)]
        adjusted = masked if max(masked) > -math.inf else adjusted
    top = max(adjusted)
    weights = [math.exp((x - top) / s.temperature) for x in adjusted]
    order = sorted(range(len(row)), key=lambda i: (-weights[i], i))
    order = order[: s.top_k] if s.top_k else order
    if s.top_p < 1:
        total, kept, mass = math.fsum(weights[i] for i in order), [], 0.0
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= s.top_p * total:
                break
        order = kept
    order = [i for i in order if weights[i] >= s.min_p]
    total = math.fsum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(row))]


def adjusted(
    row: list[float], s: SamplingParams, ends: set[int], prompt: list[int], output: list[int]
) -> Any:
    logits = torch.tensor(row, dtype=torch.float64)
    adjustment = Adjustment.of(s, tuple(ends))
    if adjustment is not None:
        adjustment.apply(logits, np.array(prompt + output, np.int64), len(prompt))
    return logits


@settings(max_examples=200, deadline=None)
@given(LOGITS, parameters(), st.sets(st.integers(0, VOCAB - 1)), TOKENS.filter(bool), TOKENS)
def test_the_law_of_everything_together(
    row: list[float], s: SamplingParams, ends: set[int], prompt: list[int], output: list[int]
) -> None:
    """Frequencies over n evenly spaced quantiles are off by at most 1/n per token from the law."""
    n = 150
    logits = adjusted(row, s, ends, prompt, output).expand(n, -1)
    u = (np.arange(n) + 0.5) / n
    each = np.ones(n)
    tokens = draw(logits, u, each * s.temperature, each * s.top_p, np.full(n, s.top_k), each * s.min_p)
    seen = np.bincount(tokens.numpy(), minlength=VOCAB) / n
    exact = np.array(law(row, s, ends, prompt, output))
    assert np.abs(seen - exact).max() <= 1 / n + 1e-9
    assert not seen[exact == 0].any()


@pytest.mark.parametrize("s", [
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2, stop_token_ids=(1,)),
])  # fmt: skip
def test_who_asks_for_nothing_has_none(s: SamplingParams) -> None:
    assert Adjustment.of(s, (1, 2)) is None
    assert Adjustment.of(SamplingParams(min_tokens=3), ()) is None


def test_greedy_follows_the_adjusted_logits() -> None:
    row = [1.0, 3.0, 2.9, -1.0, 0.0, 0.0, 0.0]

    def greedy(output: list[int], **fields: Any) -> int:
        s = SamplingParams(**fields)
        logits = adjusted(row, s, {1, 2}, [0], output)[None]
        return int(sample_rows(logits, [0], [0], [0.0], [1.0], [0], [s.min_p]))

    assert greedy([]) == 1
    assert greedy([1], presence_penalty=0.2) == 2
    assert greedy([1, 2], presence_penalty=0.2) == 1
    assert greedy([1, 1, 2], frequency_penalty=0.2) == 2
    assert greedy([1], repetition_penalty=1.5) == 2
    assert greedy([], logit_bias=((3, 100.0),)) == 3
    assert greedy([], logit_bias=((1, -100.0),)) == 2
    assert greedy([], logit_bias=((1, -100.0), (99, 100.0))) == 2
    assert greedy([], min_tokens=1) == 0
    assert greedy([5], min_tokens=1) == 1, "the tokens before it count, not itself"


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    row = [1.0] * VOCAB
    out = adjusted(row, SamplingParams(repetition_penalty=2.0), set(), [3], [4])
    assert out.tolist() == [1, 1, 1, 0.5, 0.5, 1, 1]
    out = adjusted(row, SamplingParams(presence_penalty=1.0, frequency_penalty=0.5), set(), [3, 3], [4, 4])
    assert out.tolist() == [1, 1, 1, 1, -1, 1, 1]


def test_an_answer_may_end_early_where_nothing_else_may_be_drawn() -> None:
    row = [-math.inf] * 5 + [0.0, 1.0]
    s = SamplingParams(min_tokens=3)
    assert adjusted(row, s, {5, 6}, [1], []).tolist() == row
    assert adjusted(row, s, {6}, [1], []).tolist() == [-math.inf] * 5 + [0.0, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_min_p_keeps_the_heaviest_and_its_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.999]], dtype=dtype).expand(40, -1)
    one = np.ones(40)
    tokens = draw(logits, (np.arange(40) + 0.5) / 40, one, one, np.zeros(40, np.int64), one)
    assert set(tokens.tolist()) == {1, 2}


def test_min_p_of_one_row_is_nothing_to_the_next() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(6, 50)))
    at, one = np.arange(6), np.ones(6)
    plain = sample_rows(logits, at, at, one, one, at * 0)
    mixed = sample_rows(logits, at, at, one, one, at * 0, [0.0, 0.9, 0.0, 1.0, 0.0, 0.0])
    assert mixed[[0, 2, 4, 5]].tolist() == plain[[0, 2, 4, 5]].tolist()
    assert mixed[3] == logits[3].argmax()


@pytest.mark.parametrize("repetition", [0.01, 2.0])
@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_the_ends_of_the_ranges_draw_possible_tokens(repetition: float, penalty: float) -> None:
    """A token that is not a number would fail the step of all who share it."""
    s = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=penalty,
        frequency_penalty=penalty,
        logit_bias=((2, 100.0), (3, -100.0)),
    )
    adjustment = Adjustment.of(s)
    assert adjustment is not None
    history = np.repeat(np.arange(6), 50_000)
    logits = torch.tensor([-torch.inf, 30.0, -30.0, 0.0, 1e4, -torch.inf, 5.0])
    adjustment.apply(logits, history, 5)
    assert not logits.isnan().any() and logits.amax().isfinite()
    u = np.array([0.0, 0.5, 1 - 2.0**-53])
    one = np.ones(3)
    tokens = draw(logits.expand(3, -1), u, one * 1e-4, one, np.zeros(3, np.int64), one * 0.1)
    assert set(tokens.tolist()) <= {1, 2, 3, 4, 6}
