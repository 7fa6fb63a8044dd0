"""The constants of the built-in deployment `fleet` are those of the machine that it names."""

from __future__ import annotations

import numpy as np
import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.costs.formats import Formats
from bien.core.costs.layout import Layout
from bien.core.costs.machine import load_machine
from bien.core.costs.step import StepModel
from bien.core.deployment import load_deployment
from bien.replay.commands.deployment import EXAMPLES

CONTEXT, CHUNK = 120_000, 8192


@pytest.fixture(scope="module")
def roofline() -> StepModel:
    """GLM-5.3 in FP8 on 8 x H200."""
    architecture = read_architecture("glm-5.3", 64, "bfloat16", None)
    layout, formats = Layout(tensor=8, expert=8), Formats(weights="fp8", kv="fp8")
    return StepModel(architecture, load_machine("h200"), layout, formats)


def test_constants_are_read_off_a_roofline(roofline: StepModel):
    (pool,) = load_deployment("fleet", [EXAMPLES]).pool
    step, token, row = (pool.executor.parameters[name] for name in ("step_ms", "token_ms", "row_ms"))
    for rows in (1, 2, 4, 8, 16, 32):
        ones = np.ones(rows, np.int64)
        there = 1e3 * roofline.seconds(ones * CONTEXT, ones, rows)
        assert step + rows * (token + row) == pytest.approx(there, rel=0.25), rows
    chunk = 1e3 * roofline.seconds(np.array([CONTEXT // 2]), np.array([CHUNK]), 1)
    assert step + row + CHUNK * token == pytest.approx(chunk, rel=0.1)
    assert pool.kv_tokens == roofline.kv_tokens() // 64 * 64
