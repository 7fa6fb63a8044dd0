"""`Trial`: who is to blame for the deaths of workers is found out by placing suspects one at a time.

A request that kills every worker it meets takes others with it, and nobody can tell which of them it was.
The second loss makes all of them suspects. Each is on trial as long as it could be placed again: a stream
until its first token, any other one until its end; a worker that dies meanwhile is its fault alone. So the
innocent, who would have shared the culprit's fate, are served; unless a second culprit, of whom nobody knows
yet, strikes where one of them is on trial.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bien.gateway.stream import Stream


class Trial:
    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # first come, first served

    async def enter(self, stream: Stream) -> None:
        """Wait for its turn, which lasts until somebody calls `leave`, as `stream.acquit` does."""
        await self._lock.acquire()
        stream.acquit = partial(self.leave, stream)

    def leave(self, stream: Stream) -> None:
        stream.acquit = None
        self._lock.release()

    def blame(self, streams: Sequence[Stream]) -> None:
        """The worker of these has died."""
        culprit = next((stream for stream in streams if stream.acquit is not None), None)
        for stream in [culprit] if culprit is not None else streams:
            stream.losses += 1
