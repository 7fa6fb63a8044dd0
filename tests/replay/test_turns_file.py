from __future__ import annotations

from pathlib import Path

import pytest

from bien.core.errors import ResourceError, UserError
from bien.replay.driver import Driver
from bien.replay.measure import measure
from bien.replay.result import write_result
from bien.replay.turns_file import TurnLine, read_turns, turn_lines, turns_path, write_turns
from bien.traces.model import Stream, TraceMeta
from tests.replay.fakes import FakeTarget, chain, drive, session


def run() -> Driver:
    child = Stream(1, chain(9000, (1, 30, 5)), parent=0, spawned_after=0, joined_before=1, label="explore")
    sessions = [session("a", (2, 50, 11), (3, 20, 1), extra=(child,)), session("b", (0, 50, 1))]
    return drive(FakeTarget(fails=lambda r: r.id == "b/0/0", cached=lambda r: 16), sessions)


def saved(folder: Path, driver: Driver) -> tuple[Path, list[TurnLine]]:
    path = folder / "result.json"
    write_result(path, measure(driver, TraceMeta("weka", 64), kind="simulated", deployment={}))
    lines = turn_lines(driver.records, driver.started)
    assert write_turns(path, lines) == turns_path(path) == folder / "result.turns.jsonl.zst"
    return path, lines


def test_a_turn_has_what_a_timeline_needs() -> None:
    driver = run()
    lines = {(t.session, t.stream, t.turn): t for t in turn_lines(driver.records, driver.started)}
    first, child, second = lines["a", 0, 0], lines["a", 1, 0], lines["a", 0, 1]
    assert (first.ready, first.planned, first.sent, first.first) == (0, 2, 2, 3)
    assert first.ended == first.last == pytest.approx(4) and (first.got, first.cached) == (11, 16)
    assert first.ttft == 1 and first.tpot == pytest.approx(0.1)
    assert (child.parent, child.label, child.ready) == (0, "explore", first.ended)
    assert child.sent == pytest.approx(5) and child.ended == pytest.approx(6.4)
    # It joins the child, and its gap runs from there.
    assert second.ready == child.ended and second.sent == pytest.approx(9.4)
    assert second.parent is None and second.tpot is None
    failed = lines["b", 0, 0]
    assert failed.error == "broken" and failed.first is failed.ttft is failed.cached is None


def test_they_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, lines = saved(tmp_path, run())
    assert read_turns(turns_path(path), path) == lines
    assert len(lines) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result.json", "result.turns.jsonl.zst"]


def test_turns_of_another_run_are_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, run())
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    with pytest.raises(UserError, match=r"turns\.jsonl\.zst is of another run than .*result\.json"):
        read_turns(turns_path(path), path)


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, run())
    whole = turns_path(path).read_bytes()
    bad = tmp_path / "bad"
    for data in (b"", b"{}", whole[: len(whole) // 2]):
        bad.write_bytes(data)
        with pytest.raises(UserError, match="bad holds no turns: "):
            read_turns(bad, path)
    with pytest.raises(UserError, match="none holds no turns: .*No such file"):
        read_turns(tmp_path / "none", path)
    with pytest.raises(UserError, match=r"none\.json is no result"):
        read_turns(turns_path(path), tmp_path / "none.json")
    turns_path(path).unlink()
    turns_path(path).mkdir()
    with pytest.raises(ResourceError, match="cannot write turns"):
        write_turns(path, [])
