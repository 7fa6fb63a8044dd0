from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.replay.report.timeline import IDLE_SHARE, Span, scale, timelines
from bien.replay.turns_file import TurnLine, turn_lines
from bien.traces.model import Stream
from tests.replay.fakes import FakeTarget, chain, drive, session


def test_what_each_stream_does_when() -> None:
    child = Stream(1, chain(9000, (1, 30, 5)), parent=0, spawned_after=0, joined_before=1)
    grandchild = Stream(2, chain(99000, (0, 30, 1)), parent=1, spawned_after=0, label="explore")
    made = session("a", (2, 50, 11), (3, 20, 2), extra=(child, grandchild))
    driver = drive(FakeTarget(), [made])
    (timeline,) = timelines(turn_lines(driver.records, driver.started))
    assert [(lane.name, lane.depth, lane.turns) for lane in timeline.lanes] == [
        ("main", 0, 2), ("sub-agent 1", 1, 1), ("explore", 2, 1),
    ]  # fmt: skip
    seen = [(s.doing, round(s.start, 3), round(s.end, 3)) for s in timeline.lanes[0].spans]
    assert seen == [
        ("gap", 0, 2), ("ttft", 2, 3), ("decode", 3, 4), ("agents", 4, 6.4), ("gap", 6.4, 9.4),
        ("ttft", 9.4, 10.4), ("decode", 10.4, 10.5),
    ]  # fmt: skip
    assert (timeline.start, timeline.turns) == (0, 4) and timeline.end == pytest.approx(10.5)


def test_failed_and_cut_off_turns() -> None:
    turns = [
        TurnLine("a", 0, 0, sent=0.0, ended=2.0, error="broken"),
        TurnLine("b", 0, 0, sent=1.0, first=2.0, last=3.0),
        TurnLine("c", 5, 0, parent=4, sent=1.0, first=2.0, last=9.0, ended=9.0),
    ]
    a, b, c = timelines(turns)
    assert a.lanes[0].spans == [Span(0, 2, "failed")]
    assert b.lanes[0].spans == [Span(1, 9, "cut")]
    assert (c.lanes[0].name, c.lanes[0].depth) == ("sub-agent 5", 0)  # its parent sent nothing


def test_a_long_idle_stretch_is_drawn_short_and_only_that() -> None:
    spans = [Span(0, 10, "ttft"), Span(10, 11, "gap"), Span(11, 21, "decode"), Span(21, 9000, "gap"),
             Span(9000, 9010, "decode")]  # fmt: skip
    drawn = scale(spans)
    assert drawn.cut == [(21, 9000)]
    assert drawn.at(21) == 21 and drawn.at(9010) - drawn.at(9000) == pytest.approx(10)
    idle = 1 + drawn.at(9000) - drawn.at(21)
    assert idle / drawn.places[-1] == pytest.approx(IDLE_SHARE)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.001, 1e3)), min_size=1, max_size=20))
def test_places_keep_order_and_busy_time(turns: list[tuple[float, float]]) -> None:
    spans = [Span(a, a + long, "decode") for a, long in turns]
    drawn = scale(spans)
    for a, b in pairwise(sorted({t for s in spans for t in (s.start, s.end)})):
        assert -1e-6 <= drawn.at(b) - drawn.at(a) <= b - a + 1e-6
    for s in spans:
        assert drawn.at(s.end) - drawn.at(s.start) == pytest.approx(s.end - s.start, abs=1e-6)
        assert drawn.time(drawn.at(s.start)) == pytest.approx(s.start, abs=1e-6) or drawn.cut
