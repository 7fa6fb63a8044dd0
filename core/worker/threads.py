"""Work that would stall the event loop (tokenising, rendering) in a few threads of its own."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="bien-text")


async def in_thread(fn: Callable[..., T], *args: object) -> T:
    """`fn(*args)` off the event loop; cancelling the caller does not stop it, only drops its result."""
    return await asyncio.get_running_loop().run_in_executor(_pool(), fn, *args)


def lock() -> AbstractContextManager[Any]:
    """Held for moments by what these threads share."""
    return threading.Lock()
