"""Ladders: the rules of caps and load, the frontier, and what stays when one ends early."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.deployment import Deployment, load_deployment, parse_deployment
from bien.core.errors import BienError, DeploymentError, ResourceError, UserError
from bien.core.plugins import PluginManager
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.ladder import Ladder, Percentiles, Rung, capped, climb, mark, parse_caps
from bien.replay.ladder_display import finish_ladder
from bien.replay.ladder_plot import labels, write_plot
from bien.replay.metrics import Throughput
from bien.replay.options import ReplayOptions
from bien.replay.result import Result, Validity, read_result
from bien.replay.simulation import SimulationPlan, simulate

PNG = b"\x89PNG\r\n"


def bien(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bien.replay.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90)


def read(folder: Path) -> Ladder:
    return msgspec.json.decode((folder / "ladder.json").read_bytes(), type=Ladder, strict=True)


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load("")


@pytest.fixture(scope="module")
def result(manager: PluginManager) -> Result:
    deployment = load_deployment("laptop", [EXAMPLES])
    return simulate(SimulationPlan((), ReplayOptions(sessions=1), deployment), manager).result


def test_a_simulated_ladder_of_the_sample(tmp_path: Path) -> None:
    options = ("--deployment", "laptop", "--time-scale", "0", "--json", "r.json")
    done = bien("simulate", "--ladder", "4,1", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ladder = read(tmp_path)
    assert (ladder.schema, ladder.kind, ladder.workers) == ("bien.ladder/1", "simulated", 2)
    assert [(r.cap, r.concurrency, r.valid) for r in ladder.rungs] == [(1, 2, True), (4, 8, True)]
    for rung in ladder.rungs:
        one = read_result(tmp_path / rung.result)
        assert one.deployment["pool"][0]["scheduler"]["parameters"]["max_running"] == rung.cap
        assert one.card.concurrency == rung.concurrency
        assert rung.throughput == one.throughput.per_accelerator
        assert rung.ttft_ms == Percentiles(one.ttft_ms.p50, one.ttft_ms.p90)
        assert rung.cache_achieved == one.cache.achieved
    low, high = ladder.rungs
    assert (high.throughput.output or 0) > 1.5 * (low.throughput.output or 0), "the cap is what binds"
    assert (high.interactivity.p50 or 0) < (low.interactivity.p50 or 0)
    assert high.efficient and low.efficient
    assert low.notes == [] and "5 session trees at a time for 2 x 4 places" in high.notes[0]
    assert (tmp_path / "ladder.png").read_bytes().startswith(PNG)
    assert "Pareto" in done.stdout and not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--ladder", "1,x"], "--ladder is '1,x'; valid: batch caps from 1 to 4096"),
        (["simulate", "--ladder", "1", "--concurrency", "0"], "--concurrency is 0; valid: 1 to"),
        (["simulate", "--ladder", "1", "--json", "none/r.json"], "cannot write ladder none/ladder.json"),
        (["simulate", "--ladder", "1", "--json", "."], "--json is '.', a folder; valid: a file"),
        (["replay", "--ladder", "1", "--json", "/"], "--json is '/', a folder; valid: a file"),
        (["replay", "--ladder", "1", "--url", "http://127.0.0.1:1"], "cannot do that at --url"),
        (["replay", "--ladder", "1", "--report", "r.html"], "--report draws one run"),
        (["simulate", "--ladder", "1", "--report", "r.html"], "--report draws one run"),
    ],
)
def test_bad_options_are_one_paragraph(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = bien(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "0", "-1", "1,1", "1,,2", "5000", "1.5", "1;2"])
def test_caps_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--ladder is"):
        parse_caps(text)


def test_caps_rise() -> None:
    assert parse_caps("8, 1,2") == (1, 2, 8)


def test_a_cap_reaches_every_pool_and_nothing_else() -> None:
    base = parse_deployment(
        {
            "pool": [
                {"name": "a", "slots": 2, "scheduler": {"use": "fcfs", "token_budget": 9, "max_running": 7}},
                {"name": "b", "slots": 9, "scheduler": "priority"},
            ]
        }
    )
    a, b = capped(base, 4).pool
    assert (a.slots, a.scheduler.parameters) == (4, {"token_budget": 9, "max_running": 4})
    assert (b.slots, b.scheduler.use, b.scheduler.parameters) == (9, "priority", {"max_running": 4})
    assert capped(base, 4).gateway == base.gateway


class Runs:
    """Stands for what runs rungs: the same result each time; what it should do otherwise is by cap."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.seen: list[tuple[int, int]] = []  # cap, concurrency
        self.interrupt = 0
        self.fail = 0

    def __call__(
        self, deployment: Deployment, options: ReplayOptions, json: Path
    ) -> tuple[Result | None, bool]:
        cap = deployment.pool[0].scheduler.parameters["max_running"]
        self.seen.append((cap, options.concurrency))
        if cap == self.fail:
            raise BienError("the stack died")
        return self.result, cap == self.interrupt


def go(runs: Runs, folder: Path, manager: PluginManager, concurrency: int | None = None) -> int:
    base = load_deployment("laptop", [EXAMPLES])
    climbing = climb(
        (1, 2, 4), base, ReplayOptions(), concurrency, folder / "r.json", manager, runs, lambda text: None
    )
    return finish_ladder(climbing, folder / "r.json")


@pytest.mark.parametrize(("given", "trees"), [(None, [2, 4, 8]), (3, [3, 3, 3])])
def test_the_load_follows_the_cap(
    given: int | None, trees: list[int], result: Result, tmp_path: Path, manager: PluginManager
) -> None:
    runs = Runs(result)
    assert go(runs, tmp_path, manager, given) == 0
    assert runs.seen == list(zip((1, 2, 4), trees, strict=True))


def test_an_interrupt_keeps_the_finished_rungs(
    result: Result, tmp_path: Path, manager: PluginManager
) -> None:
    runs = Runs(result)
    runs.interrupt = 2
    assert go(runs, tmp_path, manager) == 130
    ladder = read(tmp_path)
    assert ladder.interrupted and [r.cap for r in ladder.rungs] == [1]
    assert [cap for cap, _ in runs.seen] == [1, 2]
    assert (tmp_path / "ladder.png").read_bytes().startswith(PNG)


def test_an_interrupted_first_rung_leaves_no_curve(
    result: Result, tmp_path: Path, manager: PluginManager, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ladder.png").write_bytes(PNG)  # of an earlier ladder
    runs = Runs(result)
    runs.interrupt = 1
    assert go(runs, tmp_path, manager) == 130
    assert read(tmp_path).interrupted and not read(tmp_path).rungs
    assert not (tmp_path / "ladder.png").exists()
    assert "interrupted in the first rung" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ladder.json", "ladder.png", "r-cap4.json", "r-cap4.turns.jsonl.zst"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    name: str, result: Result, tmp_path: Path, manager: PluginManager
) -> None:
    (tmp_path / name).mkdir()
    runs = Runs(result)
    with pytest.raises(ResourceError, match=f"cannot write .*{name}: Is a directory"):
        go(runs, tmp_path, manager)
    assert runs.seen == []


def test_a_note_may_hold_anything(
    result: Result, tmp_path: Path, manager: PluginManager, capsys: pytest.CaptureFixture[str]
) -> None:
    said = msgspec.structs.replace(result, validity=Validity(False, ["the server said [/INST]"]))
    assert go(Runs(said), tmp_path, manager) == 0
    assert "cap 1: not valid: the server said [/INST]" in capsys.readouterr().out


def test_so_does_a_failure(
    result: Result, tmp_path: Path, manager: PluginManager, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(result)
    runs.fail = 4
    with pytest.raises(BienError, match="the stack died"):
        go(runs, tmp_path, manager)
    assert [r.cap for r in read(tmp_path).rungs] == [1, 2]
    assert "Pareto" in capsys.readouterr().out


def test_a_scheduler_without_max_running_is_refused_before_anything_runs(
    result: Result, tmp_path: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare(msgspec.Struct, forbid_unknown_fields=True):
        pass

    changed = [
        replace(i, provider=replace(i.provider, config_type=Bare)) if i.provider.name == "fcfs" else i
        for i in manager.installed
    ]
    monkeypatch.setattr(manager, "installed", changed)
    runs = Runs(result)
    with pytest.raises(DeploymentError, match=r"as --ladder sets it for every pool: .*max_running"):
        go(runs, tmp_path, manager)
    assert runs.seen == []


def rung(cap: int, x: float | None, y: float | None, valid: bool = True) -> Rung:
    return Rung(cap, cap, "", Percentiles(x, x), Throughput(output=y), Percentiles(1, 1), None, valid, [], [])


POINTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), max_size=8)


@given(POINTS)
def test_efficient_means_that_no_valid_rung_beats_it(points: list[tuple[int, int, bool]]) -> None:
    rungs = [rung(i, x, y, valid) for i, (x, y, valid) in enumerate(points)]
    mark(rungs)
    valid = [(x, y) for x, y, ok in points if ok]
    for (x, y, ok), made in zip(points, rungs, strict=True):
        beaten = any((a >= x and b > y) or (a > x and b >= y) for a, b in valid)
        assert made.efficient == (ok and not beaten)


def test_a_rung_without_figures_is_not_efficient() -> None:
    rungs = [rung(1, None, 5.0), rung(2, 1.0, 1.0)]
    mark(rungs)
    assert [r.efficient for r in rungs] == [False, True]
    assert labels(rungs) == [(1.0, 1.0, "2")]


def test_rungs_that_lie_together_share_a_label() -> None:
    rungs = [rung(1, 100.0, 10.0), rung(2, 50.0, 90.0), rung(4, 49.0, 90.5), rung(8, 49.5, 60.0)]
    assert [text for _, _, text in labels(rungs)] == ["1", "2, 4", "8"]


@pytest.mark.parametrize("y", [0.0, 50.0])
def test_a_curve_of_one_point_is_drawn_quietly(y: float, tmp_path: Path) -> None:
    rungs = [rung(1024, 0.0, y), rung(2048, 0.0, y), rung(4096, 0.0, y)]
    ladder = Ladder(kind="live", model="$m[/]$ \x07 語", workers=1, accelerators=1, rungs=rungs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_plot(tmp_path / "p.png", ladder)
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)
