"""Intervals of simulated figures: the same run, faster and slower by what the costs may be off."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from bien.core.deployment import Deployment, ModelSpec, PoolSpec, Selection
from bien.core.plugins import PluginManager
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.interval import FIGURES, deviation, figure, find_intervals, paced, paces
from bien.replay.options import ReplayOptions
from bien.replay.simulation import SimulationPlan, calibrated, simulate
from bien.replay.traces import sample_path


def deployment(**executor: object) -> Deployment:
    pool = PoolSpec(count=2, executor=Selection("simulated", executor))
    return Deployment(ModelSpec("smollm2-135m", "bfloat16", 64, max_context=32768), pool=(pool,))


def plan(chosen: Deployment) -> SimulationPlan:
    return SimulationPlan((sample_path(),), ReplayOptions(concurrency=5, time_scale=0.0), chosen)


def test_a_machine_without_a_calibration_is_as_uncertain_as_published_points() -> None:
    some = plan(deployment(machine="h100"))
    result = simulate(some, PluginManager.load()).result
    assert deviation(result) == 0.4
    found = find_intervals(some, result)
    assert set(found) == set(FIGURES)
    for path in FIGURES:
        low, high = found[path]
        value = figure(result, path)
        assert value is not None and low <= value <= high
    low, high = found["tpot_ms.mean"]
    fast, slow = paces(0.4)
    # TPOT follows the pace but for what prompts of others add.
    assert high / low == pytest.approx(slow / fast, rel=0.1)
    assert found["cache.achieved"][1] - found["cache.achieved"][0] < 0.01


def test_of_constants_nothing_is_said() -> None:
    some = plan(deployment(step_ms=2.0))
    result = simulate(some, PluginManager.load()).result
    assert deviation(result) is None and find_intervals(some, result) == {}


def test_paces_are_multiplied() -> None:
    once = paced(paced(deployment(machine="h100", pace=1.2), 2.0), 0.5)
    assert once.pool[0].executor.parameters["pace"] == pytest.approx(1.2)
    low, high = paces(0.1)
    assert low * high == pytest.approx(1.0) and math.log(high) == pytest.approx(0.1645, rel=0.01)


def test_a_calibration_stands_in_for_the_engine_of_a_deployment(tmp_path: Path) -> None:
    from bien.core.costs.factors import CalibrationFile
    from bien.core.deployment import load_deployment

    file = tmp_path / "c.json"
    of = CalibrationFile(
        factors={"host": 20.0},
        machine="cpu-2core",
        request_seconds=0.5,
        deviation=0.03,
        formats={"weights": "int8", "routed": "", "kv": "fp32", "head": "fp32"},
        layout={"tensor": 1, "data": 1, "pipeline": 1, "expert": 1, "expert_tensor": 0},
    )
    file.write_bytes(msgspec.json.encode(of))
    chosen = calibrated(load_deployment("one-int8", [EXAMPLES]), file)
    result = simulate(plan(chosen), PluginManager.load()).result
    assert result.costs[0].deviation == 0.03 and "calibrated" in result.costs[0].provenance
    assert result.ttft_ms.p50 is not None and result.ttft_ms.p50 > 500  # the way of each request
