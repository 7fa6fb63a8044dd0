from __future__ import annotations

import math
from pathlib import Path

import pytest

from bien.core.errors import TraceError, UserError
from bien.core.plugins import PluginManager
from bien.replay import traces
from bien.replay.display import Totals
from bien.replay.options import ReplayOptions, fraction
from bien.replay.traces import Survey, open_paths
from bien.traces.model import Session, TraceMeta
from bien.traces.native import write_native
from tests.replay.fakes import session


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    sessions = [session(f"s{i}", (0, size, 1), (0, 9, 1)) for i, size in enumerate((50, 500, 70, 90))]
    path = tmp_path / "t.bien.jsonl"
    write_native(path, TraceMeta("native", 16), sessions)
    return path


def survey(path: Path, **options: float) -> Survey:
    return Survey(open_paths([path], PluginManager.load()), ReplayOptions(**options))  # type: ignore[arg-type]


def test_no_path_is_the_shipped_sample() -> None:
    sample = open_paths([], PluginManager.load())
    first: Session = next(sample.sessions())
    assert first.scope == "synthetic"


def test_totals_are_what_fits(trace: Path) -> None:
    assert survey(trace).totals(None) == Totals(4, 8)
    assert survey(trace).totals(100) == Totals(2, 4)  # 50 + 1 + 9 + 1 and 70 + …
    assert survey(trace, sessions=2).totals(200) == Totals(2, 4)
    assert survey(trace, sessions=9).totals(200) == Totals(3, 6)
    assert survey(trace, token_scale=0.25).totals(140) == Totals(4, 8)


def test_a_limit_reads_no_further_than_it_must(trace: Path) -> None:
    look = survey(trace, sessions=1)
    look.check()
    assert len(look._sizes) == 1
    look.totals(100)
    assert len(look._sizes) == 1


def test_long_traces_are_not_read_twice(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "SURVEY", 2)
    assert survey(trace).totals(None) == Totals(0, 0)
    assert survey(trace, sessions=2).totals(None) == Totals(2, 4)
    assert survey(trace, sessions=3).totals(None) == Totals(3, 0)


def test_nothing_that_fits_names_a_scale_that_would(trace: Path) -> None:
    with pytest.raises(UserError, match=r"all 4 sessions .* window of 20 tokens .*--token-scale 1/4 "):
        survey(trace).totals(20)
    assert survey(trace, token_scale=0.25).totals(20).sessions >= 1


def test_only_scales_that_there_are_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.bien.jsonl"
    write_native(path, TraceMeta("native", 16), [session("a", (0, 1 << 40, 1))])
    with pytest.raises(UserError, match="a model with a larger window$"):
        survey(path).totals(20)


def test_an_empty_or_damaged_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bien.jsonl"
    write_native(path, TraceMeta("native", 16), [])
    with pytest.raises(UserError, match="holds no session"):
        survey(path).check()
    write_native(path, TraceMeta("native", 16), [session("a")])
    with pytest.raises(UserError, match="holds no turn"):
        survey(path).check()
    write_native(path, TraceMeta("native", 16), [session("a", (0, 50, 1))])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TraceError, match="cut off"):
        survey(path).check()


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("1/32", 1 / 32), ("0.25", 0.25)])
def test_fractions(text: str, value: float) -> None:
    assert fraction(text, "--token-scale") == value


@pytest.mark.parametrize("text", ["x", "1/0", "1/2/3", ""])
def test_what_is_no_fraction(text: str) -> None:
    with pytest.raises(UserError, match="--token-scale"):
        fraction(text, "--token-scale")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ReplayOptions(concurrency=0), "--concurrency is 0"),
        (ReplayOptions(concurrency=10**20), "--concurrency is 1"),
        (ReplayOptions(time_scale=-1), "--time-scale is -1"),
        (ReplayOptions(time_scale=math.nan), "--time-scale is nan"),
        (ReplayOptions(time_scale=math.inf), "--time-scale is inf"),
        (ReplayOptions(gap_cap=-1), "--gap-cap is -1"),
        (ReplayOptions(gap_cap=math.nan), "--gap-cap is nan"),
        (ReplayOptions(sessions=0), "--sessions is 0"),
        (ReplayOptions(token_scale=0.3), "token scale 0.3"),
        (ReplayOptions(token_scale=math.inf), "token scale inf"),
    ],
)
def test_options_out_of_range(options: ReplayOptions, message: str) -> None:
    with pytest.raises(UserError, match=f"{message}.*valid"):
        options.check()


def test_a_survey_may_be_taken_session_by_session(trace: Path) -> None:
    for options, count in (({}, 4), ({"sessions": 2}, 2)):
        look = survey(trace, **options)
        steps = 0
        while look.advance():
            steps += 1
        assert steps == len(look._sizes) == count
        look.check()
        assert len(look._sizes) == count
