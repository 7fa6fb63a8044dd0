"""A target without a server, and small sessions."""

from __future__ import annotations

from collections.abc import Callable

from bien.core.clock import VirtualClock
from bien.core.request import BlockRuns
from bien.replay.cache_account import CacheAccount
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from bien.replay.record import TurnRecord
from bien.replay.target import TargetInfo, TurnRequest
from bien.traces.model import Session, Stream, Turn


class FakeTarget:
    """First token after `prefill` seconds, then one each `step` seconds."""

    def __init__(
        self,
        *,
        prefill: float = 1.0,
        step: float = 0.1,
        max_context: int | None = None,
        fails: Callable[[TurnRequest], bool] = lambda request: False,
        worker: Callable[[TurnRequest], str] = lambda request: "w0",
        cached: Callable[[TurnRequest], int] = lambda request: 0,
    ) -> None:
        self.info = TargetInfo("fake", max_context, 2)
        self.clock = VirtualClock()
        self.requests: list[TurnRequest] = []
        self.inflight = self.peak = 0
        self._prefill, self._step = prefill, step
        self._fails, self._worker, self._cached = fails, worker, cached

    async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
        self.requests.append(request)
        self.inflight += 1
        self.peak = max(self.peak, self.inflight)
        try:
            await self.clock.sleep(self._prefill)
            if self._fails(request):
                record.error = "broken"
                return
            record.worker = self._worker(request)
            record.cached = record.predicted = self._cached(request)
            record.chunk(self.clock.time(), 1)
            for _ in range(len(request.output) - 1):
                await self.clock.sleep(self._step)
                record.chunk(self.clock.time(), 1)
        finally:
            self.inflight -= 1

    async def close(self) -> None:
        pass


def session(name: str, *turns: tuple[float, int, int], extra: tuple[Stream, ...] = ()) -> Session:
    """Turns as (gap, new tokens, output tokens), each continuing the one before."""
    return Session(name, [Stream(0, chain(0, *turns)), *extra], scope=name)


def chain(base: int, *turns: tuple[float, int, int]) -> list[Turn]:
    out: list[Turn] = []
    at = base
    for gap, new, output in turns:
        prompt = BlockRuns.of([(base, at - base + new)])
        at += new + output
        out.append(Turn(prompt, BlockRuns.of([(at - output, output)]), gap=gap, derived=output))
    return out


def drive(
    target: FakeTarget, sessions: list[Session], options: ReplayOptions | None = None, block_tokens: int = 16
) -> Driver:
    """Replay on a virtual clock."""

    async def run() -> Driver:
        driver = Driver(
            target, target.clock, iter(sessions), options or ReplayOptions(), CacheAccount(block_tokens)
        )
        await driver.run()
        return driver

    return VirtualClock.run(run())
