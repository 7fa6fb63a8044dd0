from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.replay.report.words import NAME, clean, clock_text, counted, plain

TICKS = 9


@given(start=st.floats(0, 1e6), whole=st.floats(0.001, 299))
def test_ticks_of_a_short_run_read_differently(start: float, whole: float) -> None:
    step = whole / (TICKS - 1)
    texts = [clock_text(start + i * step, whole, step) for i in range(TICKS)]
    assert len(set(texts)) == TICKS
    for i, text in enumerate(texts):
        shown = float(text.removesuffix(" s"))
        assert math.isclose(shown, start + i * step, rel_tol=1e-12, abs_tol=step / 4)


@pytest.mark.parametrize(
    ("seconds", "whole", "step", "text"),
    [
        (0.0, 0.0, 0.0, "0.0 s"),
        (61.0, 400.0, 50.0, "1:01 min"),
        (3599.6, 7200.0, 900.0, "1:00 h"),
        (3605.0, 86400.0, 7.0, "1:00:05 h"),  # idle hours are cut out
    ],
)
def test_long_runs(seconds: float, whole: float, step: float, text: str) -> None:
    assert clock_text(seconds, whole, step) == text


@given(st.text())
def test_names_on_an_axis_fit(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= NAME and clean(shown) == shown and "\n" not in shown
    if shown != clean(text.replace("\n", " ")):
        assert shown.endswith("…")


def test_wide_characters_take_two_places() -> None:
    assert plain("a" * NAME) == "a" * NAME
    assert plain("a" * NAME + "b") == "a" * (NAME - 1) + "…"
    assert plain("語" * NAME) == "語" * (NAME // 2) + "…"


def test_one_is_no_plural() -> None:
    assert (counted(0, "turn"), counted(1, "turn"), counted(2000, "turn")) == (
        "0 turns",
        "1 turn",
        "2,000 turns",
    )
