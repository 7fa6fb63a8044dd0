"""The closed loop of equal requests: what a token waits for, what a first token waits for."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.costs.formats import Formats
from bien.core.costs.layout import Layout
from bien.core.costs.machine import load_machine
from bien.core.costs.serving import (
    BUNCHED,
    CHUNK,
    PROMPT,
    REQUEST,
    Load,
    apart,
    decode_step,
    flow,
    prefill_step,
    together,
)
from bien.core.costs.step import StepModel

LOAD = Load(1024, 1024, 16)


def model(name: str = "llama-3.1-8b", **layout: int) -> StepModel:
    a = read_architecture(name, 64, "bfloat16")
    return StepModel(a, load_machine("h100"), Layout(**layout), Formats("fp8", "", "fp8"))


def but(**changes: int) -> Load:
    return msgspec.structs.replace(LOAD, **changes)


def test_one_request_alone_waits_for_nobody() -> None:
    e = together(model(), but(concurrency=1))
    assert e.tpot == pytest.approx(float(decode_step(model(), 1, LOAD).sum()))
    own = float(prefill_step(model(), LOAD).sum()) + e.tpot
    assert e.ttft(1024) == pytest.approx(REQUEST + PROMPT * own)


def test_a_token_carries_its_share_of_the_prompts_of_the_others() -> None:
    prompt = float(prefill_step(model(), LOAD).sum())
    for osl in (64, 1024):
        e = together(model(), but(osl=osl))
        step = float(decode_step(model(), 16, but(osl=osl)).sum())
        # In the life of a request, osl steps, each of 15 others is prefilled once.
        assert e.tpot * osl == pytest.approx(step * osl + 15 * prompt)


def test_a_prompt_finds_a_share_of_the_others_before_it() -> None:
    few, many = together(model(), but(concurrency=2)), together(model(), but(concurrency=16))
    assert sum(few.before) == pytest.approx(BUNCHED * float(flow(model(), LOAD).sum()))
    assert sum(many.before) == pytest.approx(15 * sum(few.before))


def test_full_steps_pass_on_prompts_faster_than_prompts_alone() -> None:
    m = model("gpt-oss-120b", tensor=2)
    assert float(flow(m, LOAD).sum()) < 0.7 * float(prefill_step(m, LOAD).sum())
    long = but(isl=CHUNK)
    assert flow(m, long) == pytest.approx(prefill_step(m, long))


def test_long_prompts_take_more_steps_than_one() -> None:
    one, three = (float(prefill_step(model(), but(isl=n)).sum()) for n in (CHUNK, 3 * CHUNK))
    assert three > 3 * one  # later chunks look back on the earlier ones


def test_data_parallel_ranks_prefill_side_by_side() -> None:
    one = together(model(tensor=1), but(concurrency=32))
    four = together(model(tensor=1, data=4), but(concurrency=32))
    # A prompt takes its rank as long as alone, and each rank has a quarter of the others' prompts.
    assert sum(four.prefill) == pytest.approx(sum(one.prefill), rel=0.05)
    assert sum(four.held) == pytest.approx(sum(one.held) / 4, rel=0.05)
    assert four.tpot < one.tpot


def test_what_the_cache_cannot_hold_waits_for_whole_requests() -> None:
    room = model().kv_tokens()
    within = together(model(), Load(4096, 1024, room // 5000))
    beyond = together(model(), Load(4096, 1024, 2 * room // 4608))
    assert within.queued == 0 and beyond.queued == pytest.approx(1.0, abs=0.02)
    assert beyond.ttft(1024) > 1024 * beyond.tpot > within.ttft(1024)


def test_workers_of_their_own_do_not_hold_tokens_up() -> None:
    both = together(model(), LOAD)
    split = apart(model(), 1, model(), 1, LOAD)
    assert not any(split.held) and split.tpot < both.tpot
    assert split.tpot == pytest.approx(float(decode_step(model(), 16, LOAD).sum()))
    assert split.transfer > 0
    assert apart(model(), 1, model(), 4, LOAD).rows == 4
    wide = apart(model(), 4, model(), 1, LOAD)
    assert sum(wide.before) < sum(split.before) / 3


def test_estimates_are_plain_numbers() -> None:
    e = together(model(), LOAD)
    assert msgspec.json.decode(msgspec.json.encode(e))["rows"] == 16
    assert np.isfinite(e.ttft(LOAD.osl))
