"""`jobs.slowdown`: exact on the virtual clock, where the simulated executor says what a step costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bien.core.deployment import Deployment, ModelSpec, PoolSpec, Selection
from bien.core.plugins import PluginManager
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.replay.cli import make_app
from bien.replay.options import ReplayOptions
from bien.replay.result import Result, read_result
from bien.replay.simulation import SimulationPlan, simulate
from bien.replay.slowdown import alone, slowdown
from bien.replay.summary import print_summary
from bien.traces.model import Session, TraceMeta
from bien.traces.native import write_native
from tests.replay.fakes import FakeTarget, drive, session

COSTS = {"step_ms": 10.0, "token_ms": 1.0, "row_ms": 0.0}


def pool(**fields: object) -> PoolSpec:
    return PoolSpec(executor=Selection("simulated", COSTS), **fields)  # type: ignore[arg-type]


def run(
    folder: Path, sessions: Sequence[Session], deployment: Deployment, concurrency: int, **more: bool
) -> Result:
    path = folder / "t.bien.jsonl"
    write_native(path, TraceMeta("native", 16), sessions)
    plan = SimulationPlan((path,), ReplayOptions(concurrency=concurrency), deployment, **more)
    return simulate(plan, PluginManager.load()).result


def sessions(count: int, turns: int = 4) -> list[Session]:
    rng = random.Random(0)
    made = [[(0.0, rng.randrange(40, 200), rng.randrange(4, 20)) for _ in range(turns)] for _ in range(count)]
    return [session(f"s{i}", *each) for i, each in enumerate(made)]


def test_alone_with_an_ideal_cache_is_no_slowdown(tmp_path: Path) -> None:
    result = run(tmp_path, sessions(3), Deployment(pool=(pool(kv_tokens=32768),)), 1, slowdown=True)
    assert result.jobs.slowdown == pytest.approx(1.0, abs=1e-9)
    assert result.jobs.count == 3


def test_it_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    assert run(tmp_path, sessions(2), Deployment(pool=(pool(),)), 1).jobs.slowdown is None


def test_sharing_steps_costs_exactly_what_the_others_add(tmp_path: Path) -> None:
    """Two equal jobs of one turn at once: each step computes both, so its tokens cost twice."""
    twins = [session(name, (0.0, 100, 11)) for name in "ab"]
    result = run(tmp_path, twins, Deployment(pool=(pool(),)), 2, slowdown=True)
    apart = 11 * 10 + (100 + 10)  # ms: eleven steps, the first with the prompt
    assert result.jobs.slowdown == pytest.approx((11 * 10 + 2 * (100 + 10)) / apart)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_small_cache_slows_down_and_the_baseline_does_not_evict(hybrid: bool, tmp_path: Path) -> None:
    """What was evicted is computed again; the second run has room for everything, state snapshots too."""
    model = ModelSpec(str(write_tiny_hybrid(tmp_path / "m"))) if hybrid else ModelSpec()
    deployment = Deployment(model, pool=(pool(kv_tokens=1024, slots=1, snapshots=1),))
    work = sessions(6)
    result = run(tmp_path, work, deployment, 4, slowdown=True)
    assert result.cache.loss is not None and result.cache.loss.capacity > 0
    assert result.jobs.slowdown is not None and result.jobs.slowdown > 1.5

    loaded = drive(FakeTarget(), work)  # another cache altogether: only the turns count
    baseline = alone(deployment, loaded)
    assert baseline.pool[0].count == 1
    again = run(tmp_path, work, baseline, 1)
    assert (again.cache.achieved or 0) > (result.cache.achieved or 0)
    roomy = msgspec.structs.replace(
        baseline.pool[0], kv_tokens=8 * baseline.pool[0].kv_tokens, snapshots=100_000
    )
    more = run(tmp_path, work, msgspec.structs.replace(baseline, pool=(roomy,)), 1)
    assert more.cache == again.cache


def test_only_jobs_that_completed_in_both_runs_count() -> None:
    work = sessions(3, turns=2)
    quick = drive(FakeTarget(prefill=1.0, step=0.1), work)
    slow = drive(FakeTarget(prefill=2.0, step=0.2, fails=lambda r: r.session == "s1"), work)
    assert slowdown(slow, quick) == pytest.approx(2.0)
    assert slowdown(quick, slow) == pytest.approx(0.5)
    none = drive(FakeTarget(fails=lambda request: True), work)
    assert slowdown(none, quick) is None and slowdown(quick, none) is None


def test_the_summary_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, sessions(1), Deployment(pool=(pool(),)), 1, slowdown=True)
    print_summary(result)
    assert "waiting 1.00 times as long as alone" in capsys.readouterr().out


def test_the_command_takes_the_option(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.bien.jsonl", tmp_path / "r.json"
    write_native(trace, TraceMeta("native", 16), sessions(2))
    for option, known in (("--slowdown", True), ("--no-slowdown", False)):
        command = ["simulate", str(trace), "--deployment", "simulated", option, "--json", str(out)]
        done = CliRunner().invoke(make_app(), command)
        assert done.exit_code == 0, done.output
        assert (read_result(out).jobs.slowdown is not None) is known
