"""A worker with two engines: requests, events, loads and snapshots are of one of them, life is shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bien.core.errors import WorkerDiedError
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.harness import Harness
from bien.core.testing.hash_executor import oracle
from bien.core.worker.loop import EngineThread
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.server import Server
from bien.core.worker.socket_client import SocketClient
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from tests.core.worker.client_contract import Recorder

INFO = WorkerInfo("w0", "boot-0", "toy", dp_ranks=2, block_tokens=4, max_context=4096, slots=4)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Any, Recorder, list[Harness], Server]]:
    made = [Harness(Fcfs(FcfsConfig()), blocks=1024, max_context=INFO.max_context) for _ in range(2)]
    server = Server(INFO, "")
    for rank, one in zip(server.ranks, made, strict=True):
        rank.engine = EngineThread(one.engine, one.executor, rank)
    address = await server.listen("127.0.0.1", 0)
    for rank in server.ranks:
        rank.engine.start()
    client, recorder = await SocketClient.connect(*address), Recorder()
    client.attach(recorder)
    try:
        yield client, recorder, made, server
    finally:
        await client.close()
        server.stop("the test is over")
        await server.close(await server.stopped)


def request(rank: int, first: int = 0, prompt: int = 20, output: int = 5) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return GenerateRequest("r", TokenIds.of(range(first, first + prompt)), sampling, dp_rank=rank)


def seen(recorder: Recorder, rank: int) -> set[bytes]:
    """Blocks that it has told of."""
    batches = [f.batch for f in recorder.frames if f.batch is not None and f.batch.dp_rank == rank]
    assert [b.seq for b in batches] == list(range(1, len(batches) + 1)), "each has numbers of its own"
    packed = b"".join(e.hashes for b in batches for e in b.events if e.op == "stored")
    return {packed[i : i + 16] for i in range(0, len(packed), 16)}


async def test_each_engine_has_its_own_requests_cache_and_load() -> None:
    async with opened() as (client, recorder, made, _):
        for rid, rank in ((1, 0), (2, 1), (3, 1)):
            client.submit(rid, request(rank, first=100 * rid))
        await recorder.finished(1, 2, 3)
        for rid in (1, 2, 3):
            tokens = [t for o in recorder.outputs[rid] for t in TokenIds(o.tokens).ids().tolist()]
            prompt = list(range(100 * rid, 100 * rid + 20))
            assert tokens == oracle(prompt, 5, made[0].groups), "as on a worker of one engine"
        client.submit(4, request(1, first=100))
        client.submit(5, request(0, first=100))
        await recorder.finished(4, 5)
        assert (recorder.outputs[4][0].cached, recorder.outputs[5][0].cached) == (0, 16)
        for rank, shared in ((0, seen(recorder, 0)), (1, seen(recorder, 1))):
            snapshot = await client.snapshot(rank)
            packed = b"".join(event.hashes for event in snapshot.events)
            assert snapshot.dp_rank == rank
            assert {packed[i : i + 16] for i in range(0, len(packed), 16)} == shared
        both = await asyncio.gather(*(client.snapshot(rank) for rank in (1, 0, 1, 0)))
        assert [found.dp_rank for found in both] == [1, 0, 1, 0], "whoever answers first"
        last = {f.dp_rank: f.stats for f in recorder.frames if f.stats is not None}
        assert [last[rank].finished for rank in (0, 1)] == [2, 3]


async def test_an_abort_reaches_its_engine() -> None:
    async with opened() as (client, recorder, _, server):
        client.submit(1, request(1, output=3000))
        await recorder.until(lambda: 1 in recorder.outputs)
        client.abort(1)
        client.submit(2, request(1))
        await recorder.finished(2)
        await recorder.until(lambda: recorder.frames[-1].stats and recorder.frames[-1].stats.running == 0)
        client.submit(3, request(1, output=3000))
        client.submit(3, request(0))
        await recorder.finished(3)
        assert "rid 3 is in use" in recorder.outputs[3][-1].error
        await recorder.until(lambda: not server._places)


@pytest.mark.parametrize("rank", [2, -1])
async def test_a_rank_that_is_not_there_is_named(rank: int) -> None:
    async with opened() as (client, recorder, _, _):
        client.submit(1, request(rank))
        await recorder.finished(1)
        assert f"dp_rank is {rank}; valid: 0 to 1" in recorder.outputs[1][0].error
        with pytest.raises(WorkerDiedError, match=f"dp_rank is {rank}"):
            await client.snapshot(rank)


async def test_one_that_breaks_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a generation: half a worker would be one that lies."""
    async with opened() as (client, recorder, made, server):
        client.submit(1, request(0, output=3000))
        await recorder.until(lambda: 1 in recorder.outputs)

        def broken() -> None:
            raise RuntimeError("out of order")

        monkeypatch.setattr(made[1].engine, "begin", broken)
        client.submit(2, request(1))
        assert await server.stopped == "engine failed: RuntimeError: out of order"


async def test_a_gateway_that_joins_hears_of_each_load() -> None:
    async with opened() as (client, recorder, _, server):
        client.submit(1, request(1, output=3000))
        await recorder.until(lambda: 1 in recorder.outputs)
        host, port = server._listening.sockets[0].getsockname()[:2]  # type: ignore[union-attr]
        other, heard = await SocketClient.connect(host, port), Recorder()
        other.attach(heard)
        await heard.until(lambda: {f.dp_rank for f in heard.frames if f.stats} == {0, 1})
        assert msgspec.structs.asdict(other.info)["dp_ranks"] == 2
        await other.close()
