"""Shapes: models that have costs and no code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bien.core.architectures.registry import known_models
from bien.core.costs.layout import Layout
from bien.core.costs.machine import load_machine
from bien.core.costs.shapes import load_shape, shapes
from bien.core.costs.step import StepModel
from bien.core.errors import UserError

# total and active parameters, cached bytes per token in bf16: from the publishers' model cards and configs
COUNTS = {
    "minimax-m2.5": (229e9, 11e9, 253_952),
    "qwen3.5-397b": (397e9, 17.4e9, 30_720),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    total, active, kv = COUNTS[name]
    a = load_shape(name).architecture(name, 64, "bfloat16")
    assert a.parameters == pytest.approx(total, rel=0.01)
    assert a.active_parameters == pytest.approx(active, rel=0.02)
    assert sum(g.bytes_per_token for g in a.groups) == kv


def test_every_shape_costs_time_and_none_is_a_model() -> None:
    assert set(shapes()) == set(COUNTS)
    assert not set(shapes()) & set(known_models())
    for name in shapes():
        a = load_shape(name).architecture(name, 64, "bfloat16")
        assert not a.config  # nothing that a torch module could be made from
        step = StepModel(a, load_machine("h200"), Layout(tensor=8, expert=8))
        one = step.seconds(np.array([1000]), np.array([1]), 1)
        assert 0 < one < step.seconds(np.array([1000] * 64), np.array([1] * 64), 64)


def test_states_are_read_whatever_the_context() -> None:
    a = load_shape("qwen3.5-397b").architecture("qwen3.5-397b", 64, "bfloat16")
    state = next(g for g in a.groups if g.constant_bytes)
    assert len(state.layers) == 45 and state.constant_bytes == 45 * 64 * 128 * 128 * 4


def test_errors_name_file_and_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no shape 'minimax'.*minimax-m2\.5"):
        load_shape("minimax")
    path = tmp_path / "own.toml"
    path.write_text("layers = 0\n")
    with pytest.raises(UserError, match=r"own\.toml"):
        load_shape(path)
    path.write_text("depth = 3\n")
    with pytest.raises(UserError, match="depth"):
        load_shape(path)
