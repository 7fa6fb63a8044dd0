from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from bien.core.clock import VirtualClock
from bien.replay.cache_account import CacheAccount
from bien.replay.display import Display, Totals
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from tests.replay.fakes import FakeTarget, session


def shown(*, terminal: bool) -> str:
    out = io.StringIO()

    async def main() -> None:
        target = FakeTarget(cached=lambda r: 48)
        driver = Driver(
            target,
            target.clock,
            iter([session("a", *[(9.0, 96, 11)] * 6)]),
            ReplayOptions(),
            CacheAccount(16),
        )
        console = Console(file=out, force_terminal=terminal, width=120)
        with Display(target.clock, console) as display:
            display.step("model", "downloading", 1, 4)
            display.step("model", "downloading", 2, 4)
            follow = asyncio.create_task(display.follow(driver, Totals(1, 6)))
            await driver.run()
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)

    VirtualClock.run(main())
    return out.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "model: downloading"
    assert lines[1].startswith("sessions 0/1 · turns 0/6 · 1 in flight")
    assert lines[3] == (
        "sessions 0/1 · turns 2/6 · 0 in flight · 0.7 output tokens/s · cache hit 32.1% · ETA 1:00"
    )
    assert len(lines) == 7


@pytest.mark.parametrize("words", ["50%", "turns 5/6", "cache hit"])
def test_a_terminal_gets_a_panel(words: str) -> None:
    assert words in shown(terminal=True)


def test_what_is_said_after_the_panel_stays_as_a_line() -> None:
    """`bien serve` tells of deaths for as long as it runs; its panel is there while it starts."""
    out = io.StringIO()
    with Display(VirtualClock(), Console(file=out, force_terminal=True, width=120)) as display:
        display.step("main-0", "loading")
    display.step("main-0", "was killed")
    assert out.getvalue().endswith("main-0: was killed\n")
