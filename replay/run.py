"""Runs a plan on a loop of its own, ends it cleanly on Ctrl-C, and says how it went by an exit code."""

from __future__ import annotations

import asyncio
import signal

from bien.core.clock import WallClock
from bien.replay.display import Display
from bien.replay.live import Plan, replay
from bien.replay.report.page import draw
from bien.replay.result import Result
from bien.replay.say import say
from bien.replay.summary import print_summary

INTERRUPTED = 130


def run_live(plan: Plan) -> int:
    """0; 1 when no turn ended well; 130 when interrupted, with what was measured written."""
    result, interrupted = run_once(plan)
    if result is None:
        return INTERRUPTED
    print_summary(result)
    if result.turns.count or result.turns.unfinished:
        say(f"written to {plan.json}")
        if plan.report is not None:
            draw(plan.json, plan.report)
    if interrupted:
        return INTERRUPTED
    return 0 if result.turns.count > result.turns.errors else 1


def run_once(plan: Plan) -> tuple[Result | None, bool]:
    """The result, which is written, and whether it was interrupted. None: while it started."""
    with Display(WallClock()) as display:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            try:
                return runner.run(_main(plan, display))
            except (KeyboardInterrupt, asyncio.CancelledError):
                return None, True


async def _main(plan: Plan, display: Display) -> tuple[Result, bool]:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a terminal that closes; not below nohup
        loop.add_signal_handler(signal.SIGHUP, task.cancel)
    return await replay(plan, display)


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one: a client must cost little."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
