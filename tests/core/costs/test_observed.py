"""Step logs, and the places that their steps make."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bien.core.costs.factors import CalibrationFile, read_calibration
from bien.core.costs.observed import Step, StepRecord, by_place, read_steps
from bien.core.errors import UserError


def record(seconds: float, *rows: tuple[int, int]) -> StepRecord:
    return StepRecord(0.0, seconds, Step(tuple(s for s, _ in rows), tuple(c for _, c in rows), len(rows)))


def test_a_log_comes_back_and_its_torn_end_does_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    records = [record(0.01, (5, 1)), record(0.02, (0, 64), (9, 1))]
    text = b"".join(msgspec.json.encode(r) + b"\n" for r in records)
    file.write_bytes(text + b"[1.0, 0.0")
    assert read_steps(file) == records
    file.write_bytes(b"nonsense\n" + text)
    with pytest.raises(UserError, match="line 1"):
        read_steps(file)
    file.write_bytes(b"[0.0,0.01,[[1],[1,2],1]]\n" + text)
    with pytest.raises(UserError, match="line 1: 1 starts, 2 counts"):
        read_steps(file)
    file.write_bytes(b"[0.0,0.01,[[],[],0]]\n" + text)
    with pytest.raises(UserError, match=r"w\.jsonl, line 1: 0 starts, 0 counts"):
        read_steps(file)
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        read_steps(tmp_path / "gone.jsonl")


def test_steps_alike_are_one_place_and_a_stall_is_none_of_it() -> None:
    usual = [record(0.010 + i * 1e-4, (1000 + i, 1), (1010 + i, 1)) for i in range(9)]
    (place,) = by_place([*usual, record(0.5, (1005, 1), (1015, 1))])
    assert place.repeats == 9
    assert place.seconds == pytest.approx(0.0104)
    assert place.steps[0].starts == (1004, 1014)
    others = [record(0.01, (1000, 1)), record(0.01, (4000, 1), (4000, 1)), record(0.01, (1000, 3), (1010, 1))]
    assert len({o.place for o in by_place([*usual, *others])}) == 4


def test_sizes_of_a_step() -> None:
    step = Step((10, 100), (4, 1), 2)
    assert (step.rows, step.tokens, step.context) == (2, 5, 115)
    assert step.looked_at == 11 + 12 + 13 + 14 + 101


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "bien.calibration/9"}, r"schema 'bien\.calibration/9'"),
        ({"factors": {"atention": 1.0}}, "no term 'atention'; .*'attention'"),
        ({"factors": {"attention": -1.0}}, ">= 0"),
    ],
)
def test_a_calibration_that_is_none_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "c.json"
    good = msgspec.to_builtins(CalibrationFile(factors={"attention": 1.0}))
    file.write_bytes(msgspec.json.encode(good))
    assert read_calibration(file).factors == {"attention": 1.0}
    file.write_bytes(msgspec.json.encode({**good, **change}))
    with pytest.raises(UserError, match=message) as caught:
        read_calibration(file)
    assert str(file) in str(caught.value)
