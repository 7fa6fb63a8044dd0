"""What `bien serve` does at signals, around a stack that only notes what it is told."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bien.core.clock import VirtualClock
from bien.core.deployment import Deployment, GatewaySpec
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.gateway.core import Gateway
from bien.gateway.testing import FakeWorker
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.round_robin import RoundRobin
from bien.replay.serving import run_server
from bien.replay.stack import Stack


class Noting:
    """A stack with one request under way; `ends` when it is drained, or never."""

    model_name, url, workers = "toy", "http://here", ()

    def __init__(self, ends: bool) -> None:
        self.told: list[object] = []
        self.gateway = SimpleNamespace(inflight=1)
        self._ends = ends

    async def drain(self, seconds: float) -> None:
        self.told.append(seconds)
        if not self._ends:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.told.append("close")


@pytest.mark.parametrize("ends", [True, False])
def test_it_drains_until_all_has_ended_or_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ends: bool
) -> None:
    stack = Noting(ends)

    async def start(*_: Any, **__: Any) -> Noting:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
        return stack

    monkeypatch.setattr(Stack, "start", start)
    assert run_server(Deployment(gateway=GatewaySpec(drain_seconds=7.5))) == 0
    assert stack.told == [7.5, "close"]
    assert "draining: requests under way: 1, 7.5 s to end" in capfd.readouterr().err


def test_a_drain_takes_no_longer_than_it_may() -> None:
    clock = VirtualClock()

    async def main() -> None:
        gateway = Gateway(
            [FakeWorker(clock, auto=False)], RoundRobin(), MemoryIndex(clock), clock, GatewaySpec()
        )
        drained: list[bool] = []
        server = SimpleNamespace(drain=lambda: drained.append(gateway.ready))
        stack = Stack(cast(Any, None), gateway, cast(Any, server), "toy")
        request = GenerateRequest("r", TokenIds.of(range(10)), SamplingParams(max_tokens=3))
        async with gateway.generate(request):
            before = clock.time()
            await stack.drain(5.0)
            assert clock.time() - before == 5.0
            assert not gateway.ready and drained
        await stack.drain(5.0)
        assert clock.time() - before == 5.0  # nothing was left to wait for
        await gateway.close()

    VirtualClock.run(main())
