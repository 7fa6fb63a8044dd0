"""`Link`: the one connection to Redis, and whether it works."""

from __future__ import annotations

import logging
from typing import Any

from bien.core.api import Clock
from bien.gateway.api import close_redis, explained, masked, redis_client, redis_trouble

log = logging.getLogger("bien.gateway")


class Link:
    def __init__(self, url: str, timeout: float, clock: Clock) -> None:
        self.client: Any = redis_client(url, timeout)
        self.name = masked(url)
        self.trouble = redis_trouble()
        self.up = True
        self.reason = ""
        self.since = clock.time()
        self.failures = 0  # times that a command failed
        self.outages = 0
        self._clock = clock

    def works(self) -> None:
        if not self.up:
            log.warning("%s is back after %.0f s", self.name, self._clock.time() - self.since)
            self.up, self.reason, self.since = True, "", self._clock.time()

    def failed(self, error: BaseException) -> None:
        self.failures += 1
        self.reason = explained(error)
        if self.up:
            self.up, self.since = False, self._clock.time()
            self.outages += 1
            log.warning("%s is away: %s; serving goes on from the mirror", self.name, self.reason)

    async def close(self) -> None:
        await close_redis(self.client)
