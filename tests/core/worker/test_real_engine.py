"""The client contract over loopback with the real engine, its executor a deterministic one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.harness import Harness
from bien.core.testing.hash_executor import oracle
from bien.core.worker.loop import EngineThread
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.server import Server
from bien.core.worker.socket_client import SocketClient
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from tests.core.worker.client_contract import ClientContract, Opened, Recorder

INFO = WorkerInfo("w0", "boot-0", "toy", block_tokens=4, max_context=4096, slots=4)


@pytest.fixture(autouse=True)
def _check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIEN_CHECK", "1")


@asynccontextmanager
async def opened(depth: int = 2, blocks: int = 1024) -> AsyncIterator[tuple[Opened, Harness]]:
    made = Harness(Fcfs(FcfsConfig()), blocks=blocks, max_context=INFO.max_context)
    server = Server(INFO, "")
    rank = server.ranks[0]
    rank.engine = EngineThread(made.engine, made.executor, rank, depth=depth)
    host, port = await server.listen("127.0.0.1", 0)
    rank.engine.start()

    async def kill() -> None:
        server.stop("killed")
        await server.close(await server.stopped)

    client = await SocketClient.connect(host, port)
    recorder = Recorder()
    client.attach(recorder)
    try:
        yield Opened(client, recorder, kill), made
    finally:
        await client.close()
        await kill()


class TestSocketClient(ClientContract):
    def open(self) -> AbstractAsyncContextManager[Opened]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Opened]:
        async with opened() as (o, _):
            yield o


@pytest.mark.parametrize("depth", [1, 2])
async def test_tokens_are_the_engines_under_shortage(depth: int) -> None:
    """Too few blocks for all at once: some are preempted or wait, and integrity holds when it is idle."""
    async with opened(depth, blocks=24) as (o, made):
        prompts = {rid: list(range(rid, rid + 20)) for rid in range(1, 7)}
        sampling = SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True)
        for rid, prompt in prompts.items():
            o.client.submit(rid, GenerateRequest(f"r{rid}", TokenIds.of(prompt), sampling))
        await o.recorder.finished(*prompts)
        for rid, prompt in prompts.items():
            packed = b"".join(x.tokens for x in o.recorder.outputs[rid])
            assert list(TokenIds(packed).ids()) == oracle(prompt, 25, made.groups)
        await o.client.snapshot()
        assert o.client.alive, "check_integrity passed when the engine fell idle"
