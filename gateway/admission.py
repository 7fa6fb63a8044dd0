"""Admission: how many requests are worked on at a time. A slot is taken before any work is spent."""

from __future__ import annotations

import asyncio
from collections import deque

from bien.core.clock import Clock
from bien.core.errors import OverloadError, UserError

ENDS = 64  # ends of requests over which throughput is measured
SHORTEST, LONGEST = 1.0, 60.0  # seconds a client may be told to wait


class Slot:
    """Permission to work on one request, from `Admission.admit` until `release` or the end of a `with`."""

    __slots__ = ("_admission", "_held", "since")

    def __init__(self, admission: Admission, since: float, places: int = 1) -> None:
        self._admission = admission
        self._held = places
        self.since = since  # clock seconds

    def release(self) -> None:
        """Give the slot back; again and again is fine."""
        if self._held:
            places, self._held = self._held, 0
            self._admission._release(places)

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admission:
    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self.inflight = 0
        self.refused = 0  # ever
        self._clock = clock
        self._closed = ""  # why nobody is admitted any more
        self._ends: deque[float] = deque(maxlen=ENDS)
        self._queue = 0  # refused since a request last ended: they will come again
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    def admit(self, places: int = 1) -> Slot:
        """`places`: generations that the request runs at a time. OverloadError, with the seconds after which
        so many should be free, when they are not; UserError when there never will be."""
        if places > self.limit:
            raise UserError(
                f"n={places} is more than this server runs at a time; valid: 1 to {self.limit}", field="n"
            )
        if self._closed or self.inflight + places > self.limit:
            self.refused += 1
            self._queue += 1
            retry = self.retry_after()
            why = self._closed or f"all {self.limit} places are taken (gateway.max_inflight)"
            raise OverloadError(f"{why}; try again in {retry:.0f} s", retry_after=retry)
        self.inflight += places
        self._idle.clear()
        return Slot(self, self._clock.time(), places)

    def ended(self) -> None:
        """A request has run to its end: what throughput is measured by."""
        self._ends.append(self._clock.time())
        self._queue = 0

    def retry_after(self) -> float:
        """Seconds until the requests that were refused lately could all have been taken in."""
        if not self._ends:
            return SHORTEST
        span = self._clock.time() - self._ends[0]
        wait = span / len(self._ends) * max(1, self._queue)
        return min(max(wait, SHORTEST), LONGEST)

    @property
    def closed(self) -> bool:
        return bool(self._closed)

    def shut(self, reason: str) -> None:
        """Admit nobody from now on."""
        self._closed = reason

    async def idle(self) -> None:
        """Wait until no slot is held."""
        await self._idle.wait()

    def _release(self, places: int) -> None:
        self.inflight -= places
        if not self.inflight:
            self._idle.set()
