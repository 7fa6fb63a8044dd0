"""A step's time goes from the look for its plan, or the end of the step before it, to its own end."""

from __future__ import annotations

from pathlib import Path

import pytest

from bien.core.costs.observed import Step, read_steps
from bien.core.errors import ResourceError
from bien.core.plan import ExecutorPlan, i32
from bien.core.worker.step_log import FLUSH, StepLog


def plan(step: int, start: int) -> ExecutorPlan:
    return ExecutorPlan(step, i32([0, 1]), i32([start, 7]), i32([1, 3]), i32([0, 0]), i32([1, 1]))


def test_overlapping_and_lone_steps(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "deep" / "w.jsonl")
    log.began(1.0, plan(1, 10))
    log.began(1.5, plan(2, 11))  # planned while the first one ran
    log.ended(2.0, 1)
    log.ended(2.75, 2)
    log.began(10.0, plan(3, 12))  # after a rest
    log.ended(10.5, 3)
    log.close()
    records = read_steps(tmp_path / "deep" / "w.jsonl")
    assert [r.seconds for r in records] == [1.0, 0.75, 0.5]
    assert [r.ended for r in records] == [2.0, 2.75, 10.5]
    assert records[0].step == Step((10, 7), (1, 3), 2)


def test_a_step_that_failed_is_left_out(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "w.jsonl")
    log.began(1.0, plan(1, 10))
    log.failed(1)
    log.ended(2.0, 1)
    log.began(3.0, plan(2, 10))
    log.ended(4.0, 2)
    log.close()
    assert len(read_steps(tmp_path / "w.jsonl")) == 1


def test_lines_are_written_now_and_then(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "w.jsonl")
    for i in range(FLUSH):
        log.began(float(i), plan(i, 10))
        log.ended(i + 0.5, i)
    assert len(read_steps(tmp_path / "w.jsonl")) == FLUSH
    log.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"step_log .*file"):
        StepLog(tmp_path / "file" / "w.jsonl")
