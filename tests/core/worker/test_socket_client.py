"""Server and client over loopback, in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from bien.core.clock import WallClock
from bien.core.errors import ResourceError, UserError, WorkerDiedError
from bien.core.kv.events import EventBatch
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker import server as server_module
from bien.core.worker.handshake import Meeting, proof
from bien.core.worker.loop import EngineThread
from bien.core.worker.messages import (
    PROTOCOL,
    Challenge,
    Hello,
    Join,
    Ping,
    Pong,
    PromptPart,
    Proof,
    Shutdown,
    StepFrame,
    Submit,
)
from bien.core.worker.server import Server
from bien.core.worker.socket_client import LOOKS, SocketClient
from bien.core.worker.wire import frame, from_worker_reader, to_worker_reader
from tests.core.worker.client_contract import ClientContract, Opened, Recorder
from tests.core.worker.fake_engine import FakeEngine, FakeExecutor, info

TOKEN = "open sesame"


class Running:
    """A server with a fake engine, and its address."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.server = Server(info(), TOKEN)
        rank = self.server.ranks[0]
        rank.engine = EngineThread(self.engine, FakeExecutor(), rank)  # type: ignore[arg-type]
        self.host, self.port = "", 0

    async def connect(self) -> tuple[SocketClient, Recorder]:
        client = await SocketClient.connect(self.host, self.port, TOKEN)
        recorder = Recorder()
        client.attach(recorder)
        return client, recorder

    async def stop(self) -> None:
        self.server.stop("the test ends")
        await self.server.close(await self.server.stopped)


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    worker = Running()
    worker.host, worker.port = await worker.server.listen("127.0.0.1", 0)
    worker.server.ranks[0].engine.start()
    try:
        yield worker
    finally:
        await worker.stop()


class TestSocketClient(ClientContract):
    def open(self) -> AbstractAsyncContextManager[Opened]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Opened]:
        async with running() as worker:
            client, recorder = await worker.connect()
            yield Opened(client, recorder, worker.stop)
            await client.close()


def request(tokens: int = 5, prompt: int = 10, tenant: str = "", session: str = "") -> GenerateRequest:
    ids = TokenIds.of(range(prompt))
    return GenerateRequest("r", ids, SamplingParams(max_tokens=tokens), tenant=tenant, session=session)


async def test_a_gateway_hears_at_once_what_others_have_sent() -> None:
    """Not what it has sent itself; and nothing is left of it in the end, be it served, aborted or refused."""
    async with running() as worker:
        one, first = await worker.connect()
        two, second = await worker.connect()
        one.submit(1, request(3, prompt=40))
        await first.finished(1)
        one.submit(2, request(10_000, prompt=50))
        one.submit(3, request(10_000, prompt=60))
        one.abort(2)
        one.abort(3)
        one.submit(4, request(3))
        await first.finished(4)
        two.submit(1, request(3))
        await second.finished(1)
        told = [[f.unseen for f in its.frames if f.unseen is not None] for its in (first, second)]
        assert 40 in told[1] and max(told[1]) >= 50 and told[1][-1] == 0
        assert max(told[0]) == 10, "the other's one request"


async def test_two_gateways_get_their_own_outputs_and_all_events() -> None:
    async with running() as worker:
        one, first = await worker.connect()
        two, second = await worker.connect()
        one.submit(1, request(3))
        two.submit(1, request(6))
        await first.finished(1)
        await second.finished(1)
        assert (first.tokens(1), second.tokens(1)) == (3, 6)
        await first.until(lambda: sum(f.batch is not None for f in first.frames) == 2)
        await second.until(lambda: sum(f.batch is not None for f in second.frames) == 2)
        # Frames are one per step: no more than the steps, the one of the join, and changes while idle.
        assert len([f for f in first.frames if f.outputs]) == 3
        await one.close()
        await two.close()


async def test_a_lost_gateway_takes_its_requests_along() -> None:
    async with running() as worker:
        one, first = await worker.connect()
        two, second = await worker.connect()
        one.submit(1, request(5000, session="slow"))
        await first.until(lambda: 1 in first.outputs)
        one._drop()
        await second.until(lambda: second.frames[-1].stats and second.frames[-1].stats.running == 0)
        assert worker.engine.log == ["abort r"]
        two.submit(1, request())
        await second.finished(1)
        await two.close()


async def test_a_prompt_of_200k_tokens_lets_others_pass() -> None:
    async with running() as worker:
        client, recorder = await worker.connect()
        client.submit(1, request(2, prompt=200_000, tenant="checked"))
        client.submit(2, request(2, prompt=200_000, tenant="checked"))
        client.submit(3, request(1))
        await recorder.finished(1, 2, 3)
        finished = [o.rid for f in recorder.frames for o in f.outputs if o.finish]
        assert finished[0] == 3, "the small one does not wait for the large ones"
        assert {recorder.finish(rid) for rid in (1, 2, 3)} == {"length"}
        await client.close()


async def test_a_request_can_be_aborted_while_its_prompt_is_on_its_way() -> None:
    async with running() as worker:
        client, recorder = await worker.connect()
        client.submit(1, request(2, prompt=200_000))
        client.abort(1)
        client.submit(2, request(2))
        await recorder.finished(2)
        assert 1 not in recorder.outputs
        assert worker.engine.log == []
        await client.close()


async def test_duplicate_rid_while_its_prompt_is_on_its_way() -> None:
    async with running() as worker:
        client, recorder = await worker.connect()
        client.submit(1, request(2, prompt=200_000))
        client.submit(1, request(2, prompt=200_000))
        await recorder.finished(1)
        assert "rid 1 is in use" in recorder.outputs[1][-1].error
        client.submit(1, request(2))
        await recorder.until(lambda: recorder.finish(1) == "length")
        await client.close()


async def test_odd_prompt_bytes_are_the_requests_fault() -> None:
    async with running() as worker:
        client, recorder = await worker.connect()
        client.submit(1, GenerateRequest("r", TokenIds(b"12345")))
        await recorder.finished(1)
        assert recorder.outputs[1][0].error_code == "invalid_request"
        await client.close()


JOIN = object()  # in place of the frames of one who knows the token


async def raw(worker: Running, *messages: object) -> list[object]:
    """What a worker answers to these frames until it hangs up."""
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    frames = from_worker_reader()
    got: list[object] = []
    async with asyncio.timeout(10):
        for message in messages:
            if message is JOIN:
                writer.write(frame(Join(PROTOCOL, "mine")))
                (challenge,) = frames.feed(await reader.read(65536))
                assert isinstance(challenge, Challenge)
                meeting = Meeting(f"{worker.host}:{worker.port}", "mine", challenge.nonce)
                message = Proof(proof("gateway", TOKEN, meeting))
            writer.write(message if isinstance(message, bytes) else frame(message))
        while data := await reader.read(65536):
            got += frames.feed(data)
    writer.close()
    return got


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([Join(PROTOCOL + 1, "x")], f"protocol {PROTOCOL + 1} is not spoken here; valid: {PROTOCOL}"),
        ([bytes(frame(["join", 2, TOKEN]))], f"protocol 2 is not spoken here; valid: {PROTOCOL}"),
        ([Join(PROTOCOL, "x"), Proof("guess")], "wrong proof: gateway.secret, or the index's namespace, is"),
        ([Proof("guess")], "the first frame must be a join"),
        ([Join(PROTOCOL, "x"), Submit(1, request())], "a proof must follow the join"),
        ([Join(PROTOCOL, "x"), Join(PROTOCOL, "x")], "a proof must follow the join"),
        ([Join(PROTOCOL, "x"), b"\0\0\1\0"], "a frame of 65536 bytes; at most 4096 are allowed"),
        ([Submit(1, request())], "the first frame must be a join"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "a frame of 542393671 bytes; at most 4096 are allowed"),
        ([JOIN, b"\x03\0\0\0abc"], "a frame of 3 bytes is not decodable"),
        ([JOIN, Join(PROTOCOL, "x")], "joined already"),
        ([JOIN, Submit(1, request(), 2), PromptPart(1, b"123")], "more prompt bytes than"),
    ],
)
async def test_bad_peers_are_told_why_and_the_worker_lives_on(messages: list[object], reason: str) -> None:
    async with running() as worker:
        *_, last = await raw(worker, *messages)
        assert isinstance(last, Shutdown)
        assert reason in last.reason
        client, recorder = await worker.connect()
        client.submit(1, request())
        await recorder.finished(1)
        await client.close()


async def test_silent_peers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "JOIN_SECONDS", 0.02)
    async with running() as worker:
        assert await raw(worker) == [Shutdown("no join in time")]


async def test_a_gateway_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as worker:
        client, recorder = await worker.connect()
        monkeypatch.setattr(server_module, "MAX_UNSENT", -1)
        client.submit(1, request())
        await recorder.until(lambda: recorder.deaths)
        monkeypatch.undo()
        other, others = await worker.connect()
        other.submit(1, request())
        await others.finished(1)
        await other.close()


async def test_a_shutdown_says_goodbye_with_its_reason() -> None:
    async with running() as worker:
        client, recorder = await worker.connect()
        client.shutdown("enough")
        assert await worker.server.stopped == "stopped"
        await worker.server.close("going home")
        await recorder.until(lambda: recorder.deaths)
        assert recorder.deaths == ["going home"]


async def test_connect_names_what_went_wrong(unused_tcp_port_factory: Callable[[], int]) -> None:
    port = unused_tcp_port_factory()
    with pytest.raises(ResourceError, match=f"no worker at 127.0.0.1:{port}"):
        await SocketClient.connect("127.0.0.1", port)
    async with running() as worker:
        with pytest.raises(UserError, match="does not prove to know this deployment's token"):
            await SocketClient.connect(worker.host, worker.port, "guess")
        with pytest.raises(ResourceError, match=f"cannot listen on 127.0.0.1:{worker.port}"):
            await Server(info(), TOKEN).listen("127.0.0.1", worker.port)


async def test_a_peer_that_never_answers_is_given_up() -> None:
    async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _.read()
        writer.close()

    listening = await asyncio.start_server(mute, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    async with listening:
        with pytest.raises(ResourceError, match="did not answer in"):
            await SocketClient.connect(host, port, timeout=0.02)


async def test_a_stranger_on_the_port_is_no_worker() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    async with listening:
        with pytest.raises(UserError, match="does not speak this protocol"):
            await SocketClient.connect(host, port)


async def test_frames_before_attach_are_kept() -> None:
    async with running() as worker:
        client = await SocketClient.connect(worker.host, worker.port, TOKEN)
        client.submit(1, request(1))
        async with asyncio.timeout(10):
            while not any(isinstance(f, StepFrame) and f.outputs for f in client._early):
                await asyncio.sleep(0.001)
        recorder = Recorder()
        client.attach(recorder)
        assert recorder.finish(1) == "length"
        await client.close()


async def test_a_death_ends_the_wait_for_a_snapshot_and_is_told_late_listeners() -> None:
    async with running() as worker:
        client = await SocketClient.connect(worker.host, worker.port, TOKEN)
        waiting = asyncio.create_task(client.snapshot())
        await asyncio.sleep(0)
        client._drop()
        with pytest.raises(WorkerDiedError, match="was lost"):
            await waiting
        with pytest.raises(WorkerDiedError, match="'w0' is gone"):
            await client.snapshot()
        recorder = Recorder()
        client.attach(recorder)
        await recorder.until(lambda: recorder.deaths)
        assert len(recorder.deaths) == 1


class Mute:
    """A worker that takes a connection, says hello and is hung: nothing is read or said any more."""

    def __init__(self) -> None:
        self.joins = 0
        self.hung = asyncio.Event()  # clear: it answers
        self.pings = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Mute:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        messages = to_worker_reader()
        while data := await reader.read(65536):
            for message in messages.feed(data):
                if isinstance(message, Join):
                    self.joins += 1
                    meeting = Meeting(f"127.0.0.1:{self.port}", message.nonce, "its nonce")
                    writer.write(frame(Challenge(PROTOCOL, meeting.worker, proof("worker", "", meeting))))
                elif isinstance(message, Proof):
                    writer.write(frame(Hello(PROTOCOL, info())))
                elif isinstance(message, Ping):
                    self.pings += 1
                    if not self.hung.is_set():
                        writer.write(frame(Pong(message.number)))


async def test_a_worker_that_answers_nothing_is_given_up() -> None:
    async with Mute() as worker:
        client = await SocketClient.connect("127.0.0.1", worker.port, silence=0.2)
        recorder = Recorder()
        client.attach(recorder)
        await client.ping()
        while worker.pings < 2 * LOOKS:  # nothing else is said, and it is alive
            await asyncio.sleep(0.01)
        assert client.alive
        worker.hung.set()
        asked = asyncio.ensure_future(client.ping())
        waiting = asyncio.ensure_future(client.snapshot())
        await recorder.until(lambda: recorder.deaths)
        assert recorder.deaths == ["it has not answered for 0.2 seconds"] and not client.alive
        for gone in (asked, waiting):
            with pytest.raises(WorkerDiedError):
                await gone
        with pytest.raises(WorkerDiedError):
            await client.ping()
        await client.close()


async def test_one_is_waited_for_without_end_where_that_is_wanted() -> None:
    async with Mute() as worker:
        worker.hung.set()
        client = await SocketClient.connect("127.0.0.1", worker.port, silence=0.0)
        client.attach(Recorder())
        await asyncio.sleep(0.1)
        assert client.alive and not worker.pings
        await client.close()


async def test_a_gateway_that_stood_still_itself_gives_nobody_up() -> None:
    async with Mute() as worker:
        client = await SocketClient.connect("127.0.0.1", worker.port, silence=0.2)
        client.attach(Recorder())
        for _ in range(3):
            WallClock().block(0.25)  # the loop: many looks would have been due
            await asyncio.sleep(0)
            assert client.alive
        await client.close()


async def test_a_step_may_be_as_long_as_it_likes() -> None:
    """What computes is another thread than what answers."""
    async with running() as worker:
        client = await SocketClient.connect(worker.host, worker.port, TOKEN, silence=0.2)
        recorder = Recorder()
        client.attach(recorder)
        held, begun = threading.Event(), threading.Event()
        begin = worker.engine.begin

        def long() -> object:
            begun.set()
            held.wait(20)
            return begin()

        worker.engine.begin = long  # type: ignore[method-assign, assignment]
        client.submit(1, request(2))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        before = client._pinged
        while client._pinged < before + 3 * LOOKS:
            await asyncio.sleep(0.01)
        assert client.alive and not recorder.outputs
        held.set()
        await recorder.finished(1)
        assert recorder.finish(1) == "length" and not recorder.deaths
        await client.close()


class Published:
    """In place of a publisher."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.hurried = 0

    def add(self, batch: EventBatch) -> None:
        self.batches.append(batch)

    def hurry(self) -> None:
        self.hurried += 1


async def test_who_joins_a_worker_that_publishes_hears_first_where_it_is() -> None:
    """What is stored may be behind it, and nothing else may come for long."""
    async with running() as worker:
        early, recorder = await worker.connect()
        assert not [f.batch for f in recorder.frames if f.batch], "without a store there is nothing behind"
        worker.server.publisher = published = Published()  # type: ignore[assignment]
        client = await SocketClient.connect(worker.host, worker.port, TOKEN)
        mark = client._early[0].batch  # before it can ask anything
        assert mark is not None and (mark.seq, mark.events, mark.dp_rank) == (1, [], 0)
        assert published.batches == [mark] and published.hurried == 1
        other = await SocketClient.connect(worker.host, worker.port, TOKEN)
        batches = [f.batch for f in other._early if f.batch]
        assert [b.seq for b in batches] == [2]
        await recorder.until(lambda: [f.batch.seq for f in recorder.frames if f.batch] == [1, 2])
        assert (await early.snapshot()).seq == 2
        worker.server.publisher = None
        for one in (early, client, other):
            await one.close()
