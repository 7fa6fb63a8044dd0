"""Judging predictions by goals or by what live runs differ by, whichever is more."""

from __future__ import annotations

from pathlib import Path

import pytest

from bien.core.errors import UserError
from bien.replay.validate.engine import GOALS, RANKED, Level, judge
from bien.replay.validate.engine_display import print_validation
from bien.replay.validate.engine_plot import write_plot
from bien.replay.validate.engine_subjects import find_subjects, parse_loads

PATHS = [*(g.path for g in GOALS), *RANKED, "throughput.per_accelerator.output", "cache.achieved"]


def level(n: int, predicted: float, live: list[float], cached: list[int] | None = None) -> Level:
    return Level(
        "a",
        n,
        dict.fromkeys(PATHS, predicted),
        {"throughput.output": (predicted * 0.9, predicted * 1.1)},
        [dict.fromkeys(PATHS, v) for v in live],
        100,
        cached or [100] * len(live),
        False,
        0.9,
    )


def test_errors_within_the_goal_or_twice_what_runs_differ_by() -> None:
    base = level(4, 104.0, [100.0, 100.1, 99.9])
    found = judge([base], base)
    met = {j.name: j.met for j in found.judged}
    assert met == {
        "throughput": False,
        "ITL mean": True,
        "end to end p50": True,
        "end to end p99": True,
        "TTFT p50": True,
        "TTFT p99": True,
    }
    wide = level(4, 104.0, [95.0, 100.0, 105.0])
    (throughput, *_) = judge([wide], wide).judged
    assert (
        throughput.met
        and throughput.allowed == pytest.approx(0.1)
        and throughput.spread == pytest.approx(0.05)
    )
    assert throughput.error == pytest.approx(0.04)


def test_cached_tokens_must_be_equal_where_nothing_was_evicted() -> None:
    levels = [level(1, 1.0, [1.0]), level(2, 2.0, [2.0, 2.0], [100, 99])]
    assert not judge(levels, levels[1]).cached_exact
    levels[1].evicted = True
    found = judge(levels, levels[1])
    assert found.cached_exact and found.cached_points == 0.0
    levels[1].live[1]["cache.achieved"] = 2.005
    assert judge(levels, levels[1]).cached_points == pytest.approx(0.5)


def test_order_of_configurations() -> None:
    levels = [level(n, float(n), [float(v)]) for n, v in ((1, 1), (2, 2), (3, 4), (4, 3))]
    found = judge(levels, levels[-1])
    assert found.kendall["throughput.output"] == pytest.approx(2 / 3)
    assert found.spearman["throughput.output"] == pytest.approx(0.8)
    assert judge(levels[:2], levels[1]).kendall["throughput.output"] is None


def test_an_idle_engine_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels = [level(n, float(n), [n * 1.01, n * 0.99]) for n in (1, 2, 3)]
    levels[-1].utilisation = 0.5
    found = judge(levels, levels[-1])
    assert found.notes == ["workers were busy 50% of the time at concurrency 3; valid: 70%"]
    print_validation(found)
    out = capsys.readouterr().out
    assert "cached tokens, live and predicted: equal" in out and "Kendall 1.00" in out
    write_plot(tmp_path / "p.png", found)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "a", "0,1", "2,1", "1,1", "1,,2"])
def test_loads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--concurrency is"):
        parse_loads(text, 5)


def test_one_run_says_nothing_of_what_runs_differ_by() -> None:
    with pytest.raises(UserError, match="--runs is 1"):
        parse_loads("1,2", 1)
    assert parse_loads("1,2,8", 5) == [1, 2, 8]


def test_calibrations_must_be_as_many_as_deployments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 calibrations for 2 deployments"):
        find_subjects([("a", None), ("b", None)], [tmp_path / "c"], "h100", tmp_path, print)  # type: ignore[list-item]
    with pytest.raises(UserError, match="have one name"):
        find_subjects([("a", None), ("x/a.toml", None)], [], "h100", tmp_path, print)  # type: ignore[list-item]
