"""The client contract in process, on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest

from bien.core.clock import VirtualClock
from bien.core.engine import Engine, EngineLimits
from bien.core.executors.simulated import SimulatedExecutor
from bien.core.kv.cache import KVCache
from bien.core.request import BlockRuns, Prompt, TokenIds
from bien.core.testing.harness import toy_groups
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.inprocess_ranks import InProcessRanks
from bien.core.worker.messages import WorkerInfo
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from tests.core.worker.client_contract import ClientContract, Opened, Recorder

INFO = WorkerInfo("w0", "sim-0", "toy", block_tokens=4, max_context=4096, slots=4)


def one_engine(info: WorkerInfo, jump: bool, dp_rank: int = 0) -> InProcessClient:
    clock, groups = VirtualClock(), toy_groups()
    executor = SimulatedExecutor(groups, lambda plan: 0.001, 50, virtual=True)
    executor.allocate((4096,), info.slots, info.max_context)
    engine = Engine(
        scheduler=Fcfs(FcfsConfig()),
        cache=KVCache(groups, (4096,), info.block_tokens, info.slots),
        groups=groups,
        limits=EngineLimits(info.slots, info.max_context, info.block_tokens),
        clock=clock,
    )
    return InProcessClient(info, engine, executor, clock, jump=jump, dp_rank=dp_rank)


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

    def client(self) -> InProcessClient | InProcessRanks:
        return one_engine(INFO, self.jump)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Opened]:
        client = self.client()
        recorder = Recorder()
        client.attach(recorder)

        async def kill() -> None:
            client.kill()

        yield Opened(client, recorder, kill)
        await client.close()


class TestInProcessRanks(TestInProcessClient):
    """Two engines, of which the first is asked."""

    def client(self) -> InProcessRanks:
        info = msgspec.structs.replace(INFO, dp_ranks=2)
        return InProcessRanks([one_engine(info, self.jump, rank) for rank in range(2)])

    def test_each_engine_has_its_own(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                for rid, rank in ((1, 0), (2, 1), (3, 1)):
                    o.client.submit(rid, msgspec.structs.replace(self.request(prompt=64), dp_rank=rank))
                o.client.submit(4, msgspec.structs.replace(self.request(output=3000), dp_rank=1))
                await o.recorder.finished(1, 2, 3)
                o.client.submit(4, self.request())  # in use, at the other engine
                await o.recorder.finished(4)
                assert "rid 4 is in use" in o.recorder.outputs[4][-1].error
                batches = [f.batch for f in o.recorder.frames if f.batch is not None]
                assert {b.dp_rank for b in batches} == {0, 1}
                for rank in (0, 1):
                    seqs = [b.seq for b in batches if b.dp_rank == rank]
                    snapshot = await o.client.snapshot(rank)
                    assert (snapshot.dp_rank, snapshot.seq) == (rank, seqs[-1])
                    assert seqs == list(range(1, len(seqs) + 1))
                last = {f.dp_rank: f.stats for f in o.recorder.frames if f.stats is not None}
                assert (last[0].finished, last[1].finished) == (1, 3)

        self.run(main())

    def test_one_that_fails_ends_them_all(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(output=3000))
                await o.recorder.until(lambda: 1 in o.recorder.outputs)
                o.client._ranks[1].kill("out of order")  # type: ignore[attr-defined]
                assert o.recorder.deaths == ["out of order"] and not o.client.alive
                self._check_deaf(o)

        self.run(main())
