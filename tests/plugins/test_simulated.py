"""Executor `simulated` with a machine: what its steps cost, what it refuses, what it says of itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bien.core.build import BuiltWorker, build
from bien.core.clock import VirtualClock
from bien.core.compose import compose
from bien.core.costs.correction import Correction
from bien.core.costs.factors import CalibrationFile, Residuals
from bien.core.costs.step import RESERVED
from bien.core.deployment import Deployment, ModelSpec, PoolSpec, Selection, load_deployment
from bien.core.errors import BienError, DeploymentError, ResourceError, UserError
from bien.core.plan import ExecutorPlan, i32
from bien.core.plugins import PluginManager
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.costs import PoolCosts, pool_costs

K3 = {"machine": "b300", "tensor": 8, "expert": 8, "routed": "fp4", "kv": "fp8"}


def worker(model: str, executor: dict[str, Any], **pool: Any) -> BuiltWorker:
    spec = PoolSpec(executor=Selection("simulated", executor), **pool)
    composition = compose(Deployment(ModelSpec(model, "bfloat16", 64), pool=(spec,)), PluginManager.load())
    return build(
        composition.pools[0],
        id="w",
        generation="g",
        clock=VirtualClock(),
        rng=random.Random(0),
        any_context=True,
    )


def decode(starts: list[int]) -> ExecutorPlan:
    rows, ones = len(starts), [1] * len(starts)
    return ExecutorPlan(1, i32(list(range(rows))), i32(starts), i32(ones), i32([0] * rows), i32(ones))


@pytest.mark.parametrize("model", ["kimi-k3", "glm-5.3", "gpt-oss-120b", "llama-3.1-8b"])
def test_a_run_of_steps_costs_what_its_steps_cost(model: str) -> None:
    built = worker(model, {"machine": "b300", "tensor": 8, "routed": "fp4", "weights": "fp8"})
    executor: Any = built.executor
    starts = [5, 60, 127, 2046, 2047, 2048, 90_000]  # at windows and top-k, where costs stop growing
    costs = executor.growing(decode(starts), 200)
    single = [executor.step(decode([at + k for at in starts])).seconds for k in range(200)]
    assert costs == pytest.approx(single, rel=1e-12)
    assert costs[-1] > costs[0] and np.all(np.diff(costs) >= 0)
    built.close()


def test_kv_is_what_fits_and_in_its_format() -> None:
    fp8, bf16 = worker("kimi-k3", K3), worker("kimi-k3", {**K3, "kv": "bf16"})
    small = fp8.executor.groups[0].bytes_per_token
    assert 2 * small == bf16.executor.groups[0].bytes_per_token
    assert fp8.info.fp != bf16.info.fp
    # The latent lies whole on each accelerator; states of 16 slots and 64 snapshots are cut in 8.
    weights = 205.628626624e9
    states = sum(g.constant_bytes / 8 * (16 + 64 + 1) for g in fp8.executor.groups if not g.paged)
    expected = (268e9 * (1 - RESERVED) - weights - states) / small
    assert fp8.info.capacity_tokens == pytest.approx(expected, rel=1e-3)
    assert bf16.info.capacity_tokens == pytest.approx(expected / 2, rel=1e-3)


def test_attention_ranks_hold_kv_beside_each_other() -> None:
    layout = {"machine": "h200", "weights": "fp8", "expert": 16}
    one = worker("glm-5.3", {**layout, "tensor": 16})
    two = worker("glm-5.3", {**layout, "tensor": 8, "data": 2})
    assert 1.8 < two.info.capacity_tokens / one.info.capacity_tokens < 2


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ({"machine": "b30"}, "no machine 'b30'; .*'b300'"),
        ({"machine": "none.toml"}, "machine none.toml: .*No such file"),
        ({"machine": "b300", "kv": "fp7"}, r"kv = 'fp7' is no format; .*'fp8'"),
        ({"machine": "b300", "step_ms": 8.0}, "machine and step_ms are both given"),
        ({"tensor": 8}, "tensor is given without a machine"),
        ({"machine": "b300", "tensor": 0}, "tensor: .*>= 1"),
        ({"machine": "b300", "factors": "none.json"}, "calibration none.json: .*No such file"),
        ({"machine": "b300", "tensr": 8}, "tensr.*tensor"),
    ],
)
def test_what_is_wrong_in_itself_is_refused_at_composition(executor: dict[str, Any], message: str) -> None:
    spec = PoolSpec(executor=Selection("simulated", executor))
    with pytest.raises(DeploymentError, match=message) as caught:
        compose(Deployment(pool=(spec,)), PluginManager.load())
    assert str(caught.value.field).startswith("pool[0].executor")


@pytest.mark.parametrize(
    ("model", "executor", "pool", "error", "message"),
    [
        ("kimi-k3", {"machine": "b300"}, {}, ResourceError, r"'kimi-k3' takes 5,559\.0 GB .* 1 x B300"),
        ("kimi-k3", {**K3, "tensor": 7}, {}, UserError, "96 heads cannot be cut 7 ways"),
        ("kimi-k3", {**K3, "expert": 4, "expert_tensor": 3}, {}, UserError, "896 experts on 4 x 3 parts"),
        ("kimi-k3", {**K3, "expert": 3}, {}, UserError, "expert a divisor of 896"),
        ("llama-3.1-8b", {"machine": "h100", "expert": 8}, {}, UserError, "has no experts"),
        ("kimi-k3", K3, {"kv_tokens": 9_000_000}, ResourceError, r"KV takes \d+\.\d GB .*40\.9 GB are left"),
        ("kimi-k3", K3, {"slots": 4096}, DeploymentError, "states take .*8 x B300"),
    ],
)
def test_what_the_model_cannot_have_is_refused_with_the_numbers(
    model: str, executor: dict[str, Any], pool: dict[str, Any], error: type[BienError], message: str
) -> None:
    with pytest.raises(error, match=message):
        worker(model, executor, **pool)


def test_factors_multiply_terms(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text('{"factors": {"attention": 3.0, "host": 2.0}, "more": 1}')
    plain: Any = worker("llama-3.1-8b", {"machine": "h100"}).executor
    fitted: Any = worker("llama-3.1-8b", {"machine": "h100", "factors": str(file)}).executor
    plan = decode([50_000] * 8)
    terms = plain.growing.__self__._model.terms(plan.starts, plan.counts, 8)
    more = fitted.step(plan).seconds - plain.step(plan).seconds
    assert more == pytest.approx(2 * terms.attention + terms.host)
    file.write_text('{"factors": {"atention": 3.0}}')
    with pytest.raises(DeploymentError, match="no term 'atention'; .*'attention'"):
        worker("llama-3.1-8b", {"machine": "h100", "factors": str(file)})


def test_examples_say_what_they_cost() -> None:
    for name, devices in (("kimi-k3-b300", 8), ("kimi-k3-b300-host", 8), ("glm-5.3-h200", 16)):
        composition = compose(load_deployment(name, [EXAMPLES]), PluginManager.load())
        (costs,) = pool_costs(composition)
        assert costs.accelerators == devices
        assert costs.provenance == "roofline, uncalibrated" == costs.text[:22]
        assert costs.layout["expert"] == devices and costs.source
        assert msgspec.json.decode(msgspec.json.encode(costs), type=type(costs)) == costs
    composition = compose(load_deployment("simulated", [EXAMPLES]), PluginManager.load())
    assert pool_costs(composition)[0].text == "constant costs, uncalibrated"


def test_blocks_travel_to_the_host_at_the_links_speed() -> None:
    spec = {"kv_store": Selection("host", {"capacity_blocks": 1000})}
    store: Any = worker("kimi-k3", K3, **spec).engine._store
    transfers = store._inner._transfers

    async def main() -> tuple[float, float]:
        latent = store._inner._start(lambda: None, store._inner._carried[0], lambda data, error: None)
        first = transfers._free[0]
        store._inner._start(lambda: None, store._inner._carried[1], lambda data, error: None)
        assert not latent.done()
        return first, transfers._free[0] - first

    latent, state = VirtualClock.run(main())
    groups = store._inner._bytes
    assert latent == pytest.approx(groups[0] / 64e9 / 0.8, rel=1e-6)  # whole on each accelerator
    assert state == pytest.approx(groups[1] / 8 / 64e9 / 0.8, rel=1e-6)  # cut


def costs_of(executor: dict[str, Any]) -> list[PoolCosts]:
    spec = PoolSpec(executor=Selection("simulated", executor))
    deployment = Deployment(ModelSpec("llama-3.1-8b", "bfloat16", 64), pool=(spec,))
    return pool_costs(compose(deployment, PluginManager.load()))


def test_pace_is_of_every_step() -> None:
    plan = decode([50_000] * 8)
    for costs in ({"machine": "h100"}, {"step_ms": 3.0}):
        plain: Any = worker("llama-3.1-8b", costs).executor
        slow: Any = worker("llama-3.1-8b", {**costs, "pace": 1.5}).executor
        assert slow.step(plan).seconds == pytest.approx(1.5 * plain.step(plan).seconds)
    slow = worker("llama-3.1-8b", {"machine": "h100", "pace": 1.5}).executor
    plain = worker("llama-3.1-8b", {"machine": "h100"}).executor
    np.testing.assert_allclose(slow.growing(plan, 5), 1.5 * plain.growing(plan, 5))
    with pytest.raises(DeploymentError, match="pace"):
        worker("llama-3.1-8b", {"pace": 0.0})


def test_a_calibration_says_whose_it_is_and_is_of_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    formats = {"weights": "fp8", "routed": "", "kv": "bf16", "head": "bf16"}
    found = CalibrationFile(
        factors={"host": 2.0},
        correction=Correction((1.0, 1.0, 1.0), [(3.0, 0.0, 15.6)], [0.4]),
        engine="vLLM 1.2",
        machine="h100",
        formats=formats,
        held_out=Residuals(9, 0.031, 0.1, 0.0),
        deviation=0.05,
    )
    file.write_bytes(msgspec.json.encode(found))
    calibrated: dict[str, Any] = {"machine": "h100", "factors": str(file), "weights": "fp8"}
    plan = decode([50_000] * 8)
    corrected, plain = worker("llama-3.1-8b", calibrated), worker("llama-3.1-8b", {"machine": "h100"})
    assert corrected.executor.step(plan).seconds > 1.3 * plain.executor.step(plan).seconds  # type: ignore[attr-defined]
    (costs,) = costs_of(calibrated)
    assert costs.provenance == "roofline, calibrated on vLLM 1.2 (its error elsewhere 3.1%)"
    assert costs.deviation == 0.05
    other = {**calibrated, "weights": "bf16", "tensor": 2}
    assert "extrapolated to another weights" in costs_of(other)[0].provenance
    with pytest.raises(DeploymentError, match="factors are of the machine 'h100'"):
        worker("llama-3.1-8b", {**calibrated, "machine": "b300"})
