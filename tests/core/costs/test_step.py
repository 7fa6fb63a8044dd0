"""Costs of steps: by hand where a hand can, and laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.architectures.registry import read_architecture
from bien.core.costs.formats import Formats
from bien.core.costs.layout import Layout
from bien.core.costs.machine import load_machine, machines
from bien.core.costs.step import TERMS, StepModel
from bien.core.errors import ResourceError, UserError

LAYOUTS = {
    "llama-3.1-70b": Layout(tensor=4, pipeline=2),
    "glm-5.3": Layout(data=8, expert=8),
    "kimi-k3": Layout(tensor=8, expert=8),
    "gpt-oss-120b": Layout(tensor=2, data=2, expert=4),
}


def model(name: str, machine: str = "h200", formats: Formats | None = None, **layout: int) -> StepModel:
    a = read_architecture(name, 64, "bfloat16")
    return StepModel(a, load_machine(machine), Layout(**layout) if layout else LAYOUTS.get(name), formats)


def test_one_token_of_a_dense_model_reads_its_weights_once() -> None:
    m = model("llama-3.1-8b", "h100", tensor=1)
    terms = m.terms(np.array([0]), np.array([1]), 1)
    read = 3350e9 * 0.8
    layers = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 + 2 * 4096) + 4096
    assert terms.products == pytest.approx(2 * layers / read, rel=1e-6)
    assert terms.head == pytest.approx(2 * 128256 * 4096 / read, rel=1e-6)
    assert terms.attention == pytest.approx(131_072 / read, rel=1e-6)
    assert terms.messages == terms.experts == 0


def test_a_long_prompt_is_bound_by_computing() -> None:
    m = model("llama-3.1-8b", "h100", tensor=1)
    n = 8192
    terms = m.terms(np.array([0]), np.array([n]), 1)
    rate = 989e12 * 0.6
    products = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336)
    # The norms alone are read rather than computed.
    assert terms.products == pytest.approx(2 * products * n / rate, rel=1e-3)
    assert terms.attention == pytest.approx(32 * 4 * 32 * 128 * n * (n + 1) / 2 / rate, rel=1e-6)


@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.lists(st.integers(0, 300_000), min_size=1, max_size=9),
    st.integers(1, 40),
)
def test_a_run_of_steps_costs_what_its_steps_cost(name: str, starts: list[int], steps: int) -> None:
    m = model(name)
    at, ones = np.array(starts), np.ones(len(starts), int)
    single = [m.seconds(at + i, ones, len(starts)) for i in range(steps)]
    assert m.growing(at, len(starts), steps) == pytest.approx(single, rel=1e-9)


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 5000), st.integers(0, 100_000), st.integers(0, 3))
def test_more_costs_more(name: str, count: int, start: int, more: int) -> None:
    m = model(name)
    one = m.seconds(np.array([start]), np.array([count]), 1)
    assert m.seconds(np.array([start]), np.array([count + 1]), 1) >= one > 0
    assert m.seconds(np.array([start + 1000]), np.array([count]), 1) >= one
    many = np.array([start] + [5] * more), np.array([count] + [1] * more)
    assert m.seconds(*many, 1 + more) >= one


def test_no_sequence_is_spread_over_attention_ranks() -> None:
    """One prompt takes as long on eight ranks as on one; eight prompts take no longer than that."""
    wide, alone = model("llama-3.1-70b", data=8), model("llama-3.1-70b", tensor=1)
    one = np.array([0]), np.array([4096])
    eight = np.zeros(8, int), np.full(8, 4096)
    for term in ("products", "attention"):
        assert getattr(wide.terms(*one, 1), term) == pytest.approx(getattr(alone.terms(*one, 1), term))
        assert getattr(wide.terms(*eight, 8), term) == pytest.approx(getattr(wide.terms(*one, 1), term))


def test_experts_that_nobody_wants_are_not_read() -> None:
    m = model("qwen3-coder-480b", "b200", tensor=8)
    one = m.terms(np.array([0]), np.array([1]), 1).experts
    many = m.terms(np.array([0]), np.array([64]), 1).experts
    share = 1 - (1 - 8 / 160) ** 64
    assert many / one == pytest.approx(share / (8 / 160), rel=1e-9)


def test_latents_are_whole_on_every_rank_and_heads_are_not() -> None:
    for name, factor in (("deepseek-v3", 1.0), ("llama-3.1-70b", 8.0)):
        one, eight = (model(name, "b300", tensor=n) for n in (1, 8))
        held = [sum(h.per_token for h in m._groups) for m in (one, eight)]
        assert held[0] / held[1] == pytest.approx(factor)


def test_what_fits_beside_the_weights() -> None:
    m = model("glm-5.3", "h200", Formats("fp8", kv="bf16"), tensor=16)
    room = 141e9 * 0.92 - m.weight_bytes()
    assert m.kv_tokens() == int(room / 95_232)
    with pytest.raises(ResourceError, match=r"weights per accelerator on 1 x H200.*141 GB"):
        model("glm-5.3", "h200", tensor=1).kv_tokens()


def test_factors_of_a_calibration_multiply_their_terms() -> None:
    a, machine = read_architecture("llama-3.1-8b", 64, "bfloat16"), load_machine("h100")
    plain, fitted = StepModel(a, machine), StepModel(a, machine, factors={"products": 2.0, "host": 0.0})
    step = np.array([100, 200]), np.array([1, 1]), 2
    terms = plain.terms(*step)
    expected = sum(getattr(terms, t) for t in TERMS[:8]) + terms.products - terms.host
    assert fitted.seconds(*step) == pytest.approx(expected)


@pytest.mark.parametrize("name", machines())
def test_every_machine_runs_every_format(name: str) -> None:
    a, machine = read_architecture("qwen3-coder-480b", 64, "bfloat16"), load_machine(name)
    for kind in ("fp32", "bf16", "fp8", "int8", "fp4", "int4"):
        formats = Formats(kind, kind, "bf16")
        assert math.isfinite(StepModel(a, machine, formats=formats).seconds(np.array([9]), np.array([3]), 1))


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout(tensor=5), "tensor"),
        (Layout(pipeline=63), "pipeline"),
        (Layout(tensor=8, expert=3), "expert"),
        (Layout(tensor=8, expert=8, expert_tensor=2), "expert"),
    ],
)
def test_layouts_that_cannot_be(layout: Layout, field: str) -> None:
    with pytest.raises(UserError) as caught:
        layout.check(read_architecture("qwen3-coder-480b", 64, "bfloat16"))
    assert caught.value.field == field
    with pytest.raises(UserError, match="has no experts"):
        Layout(tensor=2, expert=2).check(read_architecture("llama-3.1-8b", 64, "bfloat16"))


def test_unknown_machines_and_formats(tmp_path) -> None:
    with pytest.raises(UserError, match="'h300'.*h200"):
        load_machine("h300")
    file = tmp_path / "mine.toml"
    file.write_text('name = "x"\nmemory_gb = -1\n')
    with pytest.raises(UserError, match=r"mine.toml"):
        load_machine(file)
    with pytest.raises(UserError, match="'fp5'"):
        Formats("fp5").check()
