"""SIGTERM, and a terminal that closes, end a command as Ctrl-C does, where no loop polls for signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDS = (signal.SIGTERM, signal.SIGHUP)


def end_as_ctrl_c() -> None:
    """From now on they raise KeyboardInterrupt. What is ignored, as below nohup, stays so."""
    for name in ENDS:
        if signal.getsignal(name) is signal.SIG_DFL:
            signal.signal(name, signal.default_int_handler)


@contextmanager
def cancelling(task: asyncio.Task[Any]) -> Iterator[None]:
    """The first of them cancels the task instead, as asyncio does for SIGINT; only after `end_as_ctrl_c`."""
    ours = [name for name in ENDS if signal.getsignal(name) is signal.default_int_handler]

    def cancel(number: int, frame: FrameType | None) -> None:
        for name in ours:
            signal.signal(name, signal.default_int_handler)
        task.cancel()

    for name in ours:
        signal.signal(name, cancel)
    try:
        yield
    finally:
        for name in ours:
            signal.signal(name, signal.default_int_handler)
