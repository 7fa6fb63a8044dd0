from __future__ import annotations

import asyncio
import base64
import socket

import pytest

from bien.core.clock import WallClock
from bien.core.errors import ResourceError, UserError
from bien.core.request import BlockRuns
from bien.core.speculation.counts import DraftCounts, SourceCounts
from bien.replay.record import TurnRecord
from bien.replay.target import TurnRequest
from bien.replay.targets import http
from bien.replay.targets.http import HttpTarget
from bien.replay.worker_load import busy_seconds
from bien.traces.materialize import Materializer
from tests.replay.fake_server import FakeServer

PROMPT, OUTPUT = BlockRuns.of([(0, 40)]), BlockRuns.of([(40, 5)])


def request(output: BlockRuns = OUTPUT) -> TurnRequest:
    return TurnRequest("s é/0/0", "s é", "scope", "", PROMPT, output)


async def generate(server: FakeServer, output: BlockRuns = OUTPUT) -> TurnRecord:
    target = await HttpTarget.connect(server.url + "/v1/", WallClock(), seed=3, vocab_size=1000)
    record = TurnRecord("s", 0, 0)
    try:
        await target.generate(request(output), record)
    finally:
        await target.close()
    return record


def test_our_server_gets_packed_ids_and_the_recorded_continuation() -> None:
    async def main() -> None:
        async with FakeServer() as server:
            record = await generate(server)
        (body,) = server.requests
        make = Materializer(1000, 3)
        assert base64.b64decode(body["prompt_token_ids_b64"]) == make.tokens(PROMPT, "scope").packed
        assert base64.b64decode(body["trace_decode_token_ids_b64"]) == make.tokens(OUTPUT, "scope").packed
        assert body["ignore_eos"] and body["stream"] and body["max_tokens"] == 5
        assert "prompt" not in body
        assert (record.got, record.cached, record.worker, record.predicted) == (5, 16, "w1", 32)
        assert (record.drafted, record.accepted, record.rounds) == (4, 3, 2)
        assert record.drafts == DraftCounts({"own": SourceCounts(2, 4, 3, [2, 2], [2, 1])})
        assert record.ok and record.sent <= record.first <= record.last
        assert sum(record.chunk_counts) == 5

    asyncio.run(main())


def test_other_servers_get_a_list_and_running_usage() -> None:
    async def main() -> None:
        async with FakeServer(ours=False) as server:
            record = await generate(server)
        (body,) = server.requests
        assert body["prompt"] == Materializer(1000, 3).tokens(PROMPT, "scope").ids().tolist()
        assert not {k for k in body if k.startswith(("trace_", "return_", "session"))}
        assert (record.got, record.cached, record.worker, record.predicted) == (5, 16, "", -1)
        assert (record.drafted, record.accepted, record.rounds) == (-1, -1, -1)
        assert record.drafts is None

    asyncio.run(main())


def test_the_model_is_asked_for() -> None:
    async def main() -> None:
        for ours in (True, False):
            async with FakeServer(ours=ours) as server:
                target = await HttpTarget.connect(server.url, WallClock(), accelerators=2)
                info = target.info
                assert (info.model, info.max_context, info.accelerators) == ("fake", 4096, 2)
                assert info.forces_tokens is ours
                assert busy_seconds(await target.metrics()) == {"w0": 3.0, "w1": 1.0}
                await target.close()

    asyncio.run(main())


def test_refusals_and_broken_streams_become_errors_of_the_turn() -> None:
    async def main() -> None:
        async with FakeServer(fail_after=3) as server:
            refused = await generate(server, BlockRuns.of([(40, 13)]))
            broken = await generate(server)
        assert refused.error == "HTTP 503: 13 is refused" and refused.overloaded
        assert broken.error == "worker died" and broken.got == 2 and not broken.overloaded

    asyncio.run(main())


def test_a_server_that_goes_away_is_an_error_of_the_turn() -> None:
    async def main() -> None:
        async with FakeServer() as server:
            target = await HttpTarget.connect(server.url, WallClock())
        record = TurnRecord("s", 0, 0)
        await target.generate(request(), record)
        await target.close()
        assert record.error and record.got == 0

    asyncio.run(main())


def test_a_server_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LOOK_SECONDS", 0.05)

    async def main() -> None:
        never = asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await never.wait()
            writer.close()

        hung = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{hung.sockets[0].getsockname()[1]}"
        with pytest.raises(ResourceError, match=r"does not answer GET /v1/models within 0\.05 s"):
            await HttpTarget.connect(url, WallClock())
        async with FakeServer(delay=30.0) as server:
            target = await HttpTarget.connect(server.url, WallClock(), silence=0.05)
            record = TurnRecord("s", 0, 0)
            await target.generate(request(), record)
            target._url = f"{url}/v1/completions"
            assert await target.metrics() == ""
            await target.close()
        assert record.error == "the server said nothing for 0.05 s"
        never.set()
        hung.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_cancelling_a_turn_leaves_the_server() -> None:
    async def main() -> None:
        async with FakeServer(delay=0.02) as server:
            target = await HttpTarget.connect(server.url, WallClock())
            record = TurnRecord("s", 0, 0)
            task = asyncio.create_task(target.generate(request(BlockRuns.of([(40, 500)])), record))
            while not record.got:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not server.left:
                await asyncio.sleep(0.01)
            await target.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_what_is_no_server_is_named() -> None:
    async def connect(url: str) -> None:
        await HttpTarget.connect(url, WallClock())

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ResourceError, match=f"no server at {url}: nothing listens there"):
            asyncio.run(connect(url))
    with pytest.raises(UserError, match="valid: http://host:port"):
        asyncio.run(connect("localhost:8000"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1"])
def test_an_impossible_url_is_answered_with_a_valid_one(url: str) -> None:
    async def connect() -> None:
        await HttpTarget.connect(url, WallClock())

    with pytest.raises(UserError, match=r"^--url is '.*'; valid: http://host:port, port 1 to 65535$"):
        asyncio.run(connect())
