"""Texts that users gave are shown as they are, whatever they mean to the library that prints them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bien.core.clock import VirtualClock
from bien.replay.display import Display
from bien.replay.ladder import Ladder, Percentiles, Rung
from bien.replay.ladder_display import print_ladder
from bien.replay.metrics import Throughput
from bien.replay.result import Result
from bien.replay.say import say
from bien.replay.summary import print_summary
from tests.replay.fakes import FakeTarget, session
from tests.replay.test_measure import drive, result_of

NASTY = ["[/INST]", "[bold]x[/bold]", "a :x: b", "[link=y]", "\\[z]", "[/]"]


def wide() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=400), out


@pytest.mark.parametrize("text", NASTY)
def test_everywhere(text: str) -> None:
    console, out = wide()
    say(text, "bold", console)
    with Display(VirtualClock(), console) as display:
        display.note(f"note {text}")
        display.step(f"who {text}", "does")
    result: Result = result_of(drive(FakeTarget(), [session("a", (0, 50, 1))]))
    result.card.model = f"model {text}"
    result.validity.reasons = [f"reason {text}"]
    result.fidelity.notes = [f"fidelity {text}"]
    print_summary(result, console)
    none = Percentiles(None, None)
    rung = Rung(1, 1, "r", none, Throughput(), none, None, False, [f"bad {text}"], [f"odd {text}"])
    print_ladder(Ladder(kind="live", model=text, workers=1, accelerators=1, rungs=[rung]), console)
    shown = out.getvalue()
    for word in ("note", "who", "model", "reason", "fidelity", "bad", "odd"):
        assert f"{word} {text}" in shown, word


def test_a_terminal_gets_no_orders_from_a_text() -> None:
    console, out = wide()
    say("a\x1b[2Jb\udcff", console=console)
    assert out.getvalue() == "a\ufffd[2Jb\ufffd\n"
