"""The client contract in process, on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from bien.core.clock import VirtualClock
from bien.core.engine import Engine, EngineLimits
from bien.core.executors.simulated import SimulatedExecutor
from bien.core.kv.cache import KVCache
from bien.core.request import BlockRuns, Prompt, TokenIds
from bien.core.testing.harness import toy_groups
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.messages import WorkerInfo
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from tests.core.worker.client_contract import ClientContract, Opened, Recorder

INFO = WorkerInfo("w0", "sim-0", "toy", block_tokens=4, max_context=4096, slots=4)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("jump", [False, True])
class TestInProcessClient(ClientContract):
    @pytest.fixture(autouse=True)
    def _variant(self, ids: bool, jump: bool) -> None:
        self.ids, self.jump = ids, jump

    def prompt(self, tokens: int) -> Prompt:
        return TokenIds.of(range(tokens)) if self.ids else BlockRuns.of([(0, tokens)])

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        VirtualClock.run(main)

    def open(self) -> AbstractAsyncContextManager[Opened]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Opened]:
        clock, groups = VirtualClock(), toy_groups()
        executor = SimulatedExecutor(groups, lambda plan: 0.001, 50, virtual=True)
        executor.allocate((4096,), INFO.slots, INFO.max_context)
        engine = Engine(
            scheduler=Fcfs(FcfsConfig()),
            cache=KVCache(groups, (4096,), INFO.block_tokens, INFO.slots),
            groups=groups,
            limits=EngineLimits(INFO.slots, INFO.max_context, INFO.block_tokens),
            clock=clock,
        )
        client = InProcessClient(INFO, engine, executor, clock, jump=self.jump)
        recorder = Recorder()
        client.attach(recorder)

        async def kill() -> None:
            client.kill()

        yield Opened(client, recorder, kill)
        await client.close()
