"""`in_processes`: work that takes a core each, side by side, each in a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from bien.core.errors import ResourceError

A = TypeVar("A")
R = TypeVar("R")


def in_processes(function: Callable[[A], R], items: Sequence[A], count: int) -> Iterator[tuple[int, R]]:
    """`function` of each item, at most `count` at a time: numbers of items with results, as they end. The
    function is one of a module; items and results can be pickled. What it raises, this raises; Ctrl-C reaches
    the caller alone, who ends the processes by leaving. ResourceError: a process was killed."""
    pool = ProcessPoolExecutor(min(count, len(items)), get_context("spawn"), initializer=_ignore_interrupts)
    try:
        running = {pool.submit(function, item): i for i, item in enumerate(items)}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        raise ResourceError(
            "a process that worked beside this one was killed; fewer at a time take less memory"
        ) from None
    finally:
        for process in list((pool._processes or {}).values()):  # what is left of them is wanted by nobody
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
