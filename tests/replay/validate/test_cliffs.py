"""`bien validate cliffs`: the rule of the knee, what was published, and a small run from end to end."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bien.core.compose import compose
from bien.core.errors import UserError
from bien.core.plugins import PluginManager
from bien.replay.cli import make_app
from bien.replay.validate.cliff_arms import ARMS, GLM, HOST_BYTES, K3, K3_HOST, SERVED, Arm
from bien.replay.validate.cliff_display import verdict
from bien.replay.validate.cliff_knee import RISE, knee, steps_apart
from bien.replay.validate.cliff_plot import write_plot
from bien.replay.validate.cliff_published import SESSIONS_SHARE
from bien.replay.validate.cliffs import Cliffs, Simulated, arms_named, curve_of, drop, run_cliffs

DATA = os.environ.get("BIEN_SHARED_DATA", "")


def test_the_knee_is_the_first_step_that_rises_enough() -> None:
    assert knee([(1, 1.0), (2, 2.0), (4, 10.1), (8, 99.0)]) == 4
    assert knee([(1, 1.0), (2, 5.0), (4, 25.0)]) is None  # more than RISE, not as much
    assert knee([(1, 1.0), (2, 0.1), (4, 0.6)]) == 4
    assert knee([(1, None), (2, 9.0)]) is None and knee([]) is None
    assert knee([(1, 1.0), (2, None), (4, 5.1)]) == 4  # a step without a value is passed over


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), st.floats(0.01, 100.0))
def test_the_knee_does_not_hang_on_the_unit(curve: list[float], unit: float) -> None:
    steps = list(enumerate(curve, 1))
    ratios = [b / a for a, b in pairwise(curve)]
    if all(abs(r / RISE - 1) > 1e-9 for r in ratios):
        assert knee(steps) == knee([(c, unit * v) for c, v in steps])
    found = knee(steps)
    assert found == next((i + 2 for i, r in enumerate(ratios) if r > RISE), None)


def test_steps_between_knees() -> None:
    grid = (1, 2, 4, 8, 16, 24)
    assert steps_apart(grid, 16, 24) == 1 and steps_apart(grid, 16, 8) == -1
    assert steps_apart(grid, 16, 16) == 0 and steps_apart(grid, 16, None) is None


def test_output_falls_after_its_highest() -> None:
    assert drop([(1, 2.0), (2, 4.0), (3, 3.0)]) == 3
    assert drop([(1, 2.0), (2, 4.0)]) is None and drop([(1, None), (2, 4.0), (3, 3.0)]) is None


@pytest.mark.parametrize(("arm", "at"), [(GLM, 5), (K3, 16), (K3_HOST, 24)])
def test_published_curves_have_their_knees(arm: Arm, at: int) -> None:
    assert knee([(p.concurrency, p.ttft) for p in arm.points]) == at
    assert list(arm.grid) == sorted(set(arm.grid))
    assert all(p.ttft is None or p.ttft > 0 for p in arm.points)
    assert all(p.hit is None or 0 <= p.hit <= 1 for p in arm.points)
    assert arm.source and all(s.name and s.value and s.source for s in arm.said) and arm.assumptions


def test_rooms_are_what_memory_arithmetic_says() -> None:
    prefill, decode = GLM.rooms()
    assert prefill.simulated and not decode.simulated
    assert prefill.tokens == SERVED < decode.tokens
    (both,) = K3.rooms()
    # The server's log: 3,249,215 tokens.
    assert 0.85 < both.tokens / 3_249_215 < 1.0


@pytest.mark.parametrize("arm", ARMS)
def test_deployments_follow_the_published_limits(arm: Arm) -> None:
    manager = PluginManager.load()
    for c in (arm.grid[0], arm.grid[-1]):
        pool = compose(arm.deployment(c), manager).pools[0].spec
        limit = 32 if arm is GLM else 2 * c
        assert pool.slots == pool.scheduler.parameters["max_running"] == limit
        assert (pool.kv_store is not None) == (arm is K3_HOST)
        assert pool.kv_tokens == (SERVED if arm is GLM else None)


def test_caches_scaled_to_the_sessions() -> None:
    assert abs(SESSIONS_SHARE - 0.549) < 0.001
    assert GLM.deployment(4, share=0.5).pool[0].kv_tokens == SERVED // 2
    whole, half = (K3.deployment(16, share=s).pool[0].kv_tokens for s in (0.9999, 0.5))
    assert whole is not None and half == pytest.approx(whole / 2, rel=1e-3)
    assert whole < K3.rooms()[0].tokens  # states have their part
    store = K3_HOST.deployment(16, share=0.5).pool[0].kv_store
    assert store is not None and store.parameters["capacity_bytes"] == HOST_BYTES // 2


def test_unknown_arms_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'kimi-k3-b300'"):
        arms_named(["kimi-k3-b30"])
    assert arms_named([]) == ARMS


def simulated(concurrency: int, ttft: float, output: float = 1.0) -> Simulated:
    return Simulated(concurrency, ttft, 2 * ttft, output, 30.0, 0.9, 0.95, 10, 0, 3, 0, 60.0)


def curves() -> Cliffs:
    late = [simulated(c, 1.0 if c < 24 else 9.0) for c in K3.grid]
    flat = [simulated(c, 1.0) for c in GLM.grid]
    found = Cliffs(trace="t", sessions=3, gap_cap=10.0)
    found.curves = [curve_of(K3, late, 1.0, []), curve_of(GLM, flat, 7.0, [])]
    return found


def test_a_curve_says_how_far_its_knee_is_off() -> None:
    late, flat = curves().curves
    assert (late.knee_simulated, late.off, late.within) == (24, 1, True)
    assert (flat.knee_simulated, flat.off, flat.within) == (None, None, False)
    assert verdict(late).endswith("published at 16, simulated at 24: 1 step late")
    assert verdict(flat).endswith("none simulated up to 8")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    write_plot(tmp_path / "cliffs.png", curves())
    assert (tmp_path / "cliffs.png").read_bytes().startswith(b"\x89PNG")
    write_plot(tmp_path / "none.png", Cliffs(trace="t", sessions=None, gap_cap=10.0))


def test_a_small_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = msgspec.structs.replace(GLM, points=GLM.points[:5])
    monkeypatch.setattr("bien.replay.validate.cliffs.ARMS", (small,))
    out, picture = tmp_path / "c.json", tmp_path / "c.png"
    done = CliRunner().invoke(
        make_app(),
        ["validate", "cliffs", "--sessions", "3", "--json", str(out), "--plot", str(picture)],
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_bytes())
    [curve] = found["curves"]
    assert found["schema"] == "bien.cliffs/1" and curve["calibrated_on"] == 1
    first = curve["simulated"][0]
    assert first["itl_ms"] == pytest.approx(30.2, rel=0.02)  # what the pace was set by
    assert [p["concurrency"] for p in curve["simulated"]] == [1, 2, 3, 4, 5]
    # More lanes start more of the three sessions in their middle.
    turns = [p["turns"] for p in curve["simulated"]]
    assert turns == sorted(turns, reverse=True) and turns[2] == turns[4] > 0
    assert not any(p["errors"] for p in curve["simulated"])
    assert picture.exists() and "prefill worker" in done.output


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--jobs is 0"):
        run_cliffs((), ARMS, jobs=0)
    with pytest.raises(UserError, match="--sessions is 0"):
        run_cliffs((), ARMS, sessions=0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("arm", "at"), [(GLM, 6), (K3, 16)], ids=["glm", "k3"])
def test_knees_on_weka_sessions(arm: Arm, at: int) -> None:
    default = Path(__file__).parents[3].parent / "shared" / "data"
    trace = Path(DATA or default) / "weka" / "traces-406.tar.xz"
    if not trace.exists():
        pytest.skip(f"no {trace}; BIEN_SHARED_DATA names the folder")
    [curve] = run_cliffs((trace,), [arm], share=SESSIONS_SHARE).curves
    assert curve.knee_simulated == at and curve.within, verdict(curve)
