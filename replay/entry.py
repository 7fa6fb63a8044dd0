"""The command `bien`: Ctrl-C ends it without a word, from its first import on."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130  # as a shell says it


def main() -> None:
    """`bien.replay.cli.main`, which takes a moment to import. Nothing is there yet that wants an end: who is
    interrupted meanwhile is gone at once, wherever in somebody's module he was."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, and stays so
    if ours:
        signal.signal(signal.SIGINT, _gone)
    from bien.replay.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _gone(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
