"""`Router`: one router under test, as its users see it, and what it says of itself where it is ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bien.core.clock import WallClock
from bien.replay.chaos.ask import Asker
from bien.replay.chaos.engine import ChaosEngine

ANSWER = 10.0  # seconds for a small answer
SETTLE = 0.6  # seconds until somebody else's router must have heard an event
LOOK, STILL, LONGEST = 0.05, 4, 6.0  # of ours it is seen: so many looks without news
COUNTED = (
    "bien_remote_events_messages_total",
    "bien_remote_events_undecodable_total",
    "bien_index_asked_total",
)


class Router(Asker):
    """Made by a `World`."""

    def __init__(
        self,
        url: str,
        model: str,
        http: aiohttp.ClientSession,
        engines: list[ChaosEngine],
        own: bool,
        pid: int,
    ) -> None:
        """`pid`: of its process, 0 where it is not on this machine."""
        super().__init__(url, model, http)
        self.engines = engines
        self.own = own
        self.pid = pid

    @property
    def listened_to(self) -> bool:
        """Whether somebody has subscribed to the events of all engines."""
        return all(engine.subscribers for engine in self.engines)

    async def settle(self) -> None:
        """Wait until it has heard what engines have said."""
        if not self.own:
            await WallClock().sleep(SETTLE)
            return
        seen, still, clock = -1.0, 0, WallClock()
        until = clock.time() + LONGEST
        while still < STILL and clock.time() < until:
            await clock.sleep(LOOK)
            now = sum([await self.metric(name) for name in COUNTED])
            still, seen = (still + 1 if now == seen else 0), now

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of its samples that have these labels; 0 where there are none."""
        async with asyncio.timeout(ANSWER), self.http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def health(self) -> dict[str, Any]:
        async with asyncio.timeout(ANSWER), self.http.get(f"{self.url}/health") as answer:
            found: dict[str, Any] = msgspec.json.decode(await answer.read())
        return found


async def until(seconds: float, holds: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until it did; -1: it did not in time."""
    clock = WallClock()
    began = clock.time()
    while not await holds():
        if clock.time() - began > seconds:
            return -1.0
        await clock.sleep(LOOK)
    return clock.time() - began
