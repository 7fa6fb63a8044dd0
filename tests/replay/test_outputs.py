"""Outputs are checked before anything runs: against what is read, against each other, and by a try."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bien.core.errors import ResourceError, UserError
from bien.core.plugins import PluginManager
from bien.replay.ladder import ladder_outputs
from bien.replay.outputs import check_outputs, check_spared, outputs_of
from bien.replay.traces import sample_path

MANAGER = PluginManager.load()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "traces" / "t.bien.jsonl"
    path.parent.mkdir()
    path.write_bytes(sample_path().read_bytes())
    return path


def check(traces: list[Path], json: Path, report: Path | None = None, deployment: str | None = None) -> None:
    check_outputs(outputs_of(json, report), traces, MANAGER, deployment)


def test_traces_and_deployment_are_spared(trace: Path, tmp_path: Path) -> None:
    link, deployment, free = tmp_path / "link.json", tmp_path / "d.toml", tmp_path / "r.json"
    link.symlink_to(trace)
    deployment.write_text("")
    turns = tmp_path / "x.turns.jsonl.zst"
    turns.symlink_to(trace)
    for traces in ([trace], [trace.parent], [deployment, trace]):
        for json, report in (
            (trace, None),
            (link, None),
            (free, trace),
            (free, link),
            (tmp_path / "x.json", None),
        ):
            with pytest.raises(UserError, match="is read to make the (result|report|turns); valid: another"):
                check(traces, json, report)
    for json, report in ((deployment, None), (free, deployment)):
        with pytest.raises(UserError, match=r"d\.toml is read to make"):
            check([trace], json, report, str(deployment))
    with pytest.raises(UserError, match="is read to make the result"):
        check([], sample_path())
    assert trace.read_bytes() == sample_path().read_bytes() and not free.exists()


def test_an_earlier_result_in_a_folder_of_traces_may_go(trace: Path) -> None:
    result = trace.with_name("result.json")
    result.write_text('{"schema": "bien.result/1"}')
    check([trace.parent], result)
    assert result.read_text(), "it is only tried"


def test_no_output_goes_where_another_goes(trace: Path, tmp_path: Path) -> None:
    json, link = tmp_path / "r.json", tmp_path / "link"
    link.symlink_to(json)
    for report in (json, tmp_path / "." / "r.json", tmp_path / "traces" / ".." / "r.json", link):
        with pytest.raises(UserError, match="is where the result goes; valid: another place for the report"):
            check([trace], json, report)
    with pytest.raises(UserError, match="is where the turns goes?; valid"):
        check([trace], json, tmp_path / "r.turns.jsonl.zst")
    with pytest.raises(UserError, match="ladder.png is read to make the plot"):
        check_spared(ladder_outputs(json, (1, 2)), [tmp_path / "ladder.png"], MANAGER)
    with pytest.raises(UserError, match="read to make the turns"):
        check_spared(ladder_outputs(json, (1, 2)), [tmp_path / "r-cap2.turns.jsonl.zst"], MANAGER)


def test_turns_are_tried_too(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "r.turns.jsonl.zst").mkdir()
    with pytest.raises(ResourceError, match="cannot write turns .*: Is a directory"):
        check([trace], tmp_path / "r.json")


def test_a_device_or_pipe_has_no_turns_and_no_report(trace: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    before = sorted(os.listdir("/dev"))
    for path in (Path("/dev/null"), pipe):
        assert outputs_of(path) == [(path, "result")]
        check([trace], path)
        with pytest.raises(UserError, match="keeps none; valid: a file as --json"):
            outputs_of(path, tmp_path / "page.html")
    check([trace], tmp_path / "r.json", Path("/dev/null"))
    assert sorted(os.listdir("/dev")) == before and os.listdir(tmp_path / "traces") == ["t.bien.jsonl"]
