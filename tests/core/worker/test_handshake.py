"""Who does not know the token learns nothing of it, and gets no prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from bien.core.errors import ResourceError, UserError
from bien.core.request import GenerateRequest, TokenIds
from bien.core.worker.handshake import Meeting, new_nonce, proof, proves
from bien.core.worker.messages import (
    PROTOCOL,
    Challenge,
    Hello,
    Join,
    Proof,
    Shutdown,
    Submit,
    WorkerInfo,
)
from bien.core.worker.server import Server
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.wire import frame, from_worker_reader, to_worker_reader
from tests.core.worker.test_socket_client import TOKEN, Running, running

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def rogue(talk: Talk) -> AsyncIterator[tuple[str, int, bytearray]]:
    """Somebody else's server: `talk` gets each connection; all that it was sent."""
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        feed = reader.feed_data

        def tapped(data: bytes) -> None:
            heard.extend(data)
            feed(data)

        heard.extend(reader._buffer)  # type: ignore[attr-defined]
        reader.feed_data = tapped  # type: ignore[method-assign]
        await talk(reader, writer)
        while await reader.read(65536):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield host, port, heard


def test_a_proof_is_of_one_side_one_token_and_one_meeting() -> None:
    meeting = Meeting("h:1", "a", "b")
    shown = proof("worker", TOKEN, meeting)
    assert proves(shown, "worker", TOKEN, meeting)
    assert not proves(shown, "gateway", TOKEN, meeting)
    assert not proves(shown, "worker", TOKEN + "x", meeting)
    for other in (
        ("h:2", "a", "b"),
        ("h:1", "x", "b"),
        ("h:1", "a", "x"),
        ("h:1", "b", "a"),
        ("h:1a", "", "b"),
    ):
        assert not proves(shown, "worker", TOKEN, Meeting(*other))
    assert not proves("", "worker", TOKEN, meeting) and not proves("ü", "worker", TOKEN, meeting)
    assert len({new_nonce() for _ in range(100)}) == 100 and len(new_nonce()) == 64


async def answers(*messages: object) -> list[object]:
    """What a gateway sends to somebody who answers its join with these."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        for message in messages:
            writer.write(frame(message))

    async with rogue(talk) as (host, port, heard):
        with pytest.raises(UserError) as caught:
            client = await SocketClient.connect(host, port, TOKEN, timeout=5.0)
            client.submit(1, GenerateRequest("r", TokenIds.of([1, 2, 3])))
        assert TOKEN not in str(caught.value) and len(str(caught.value)) < 1000
        await asyncio.sleep(0.02)
        assert TOKEN.encode() not in heard
        return to_worker_reader().feed(bytes(heard))


@pytest.mark.parametrize(
    "messages",
    [
        (Challenge(PROTOCOL, "n", "guess"),),
        (Challenge(PROTOCOL, "n", ""), Hello(PROTOCOL, WorkerInfo("w", "g", "fp"))),
        (Hello(PROTOCOL, WorkerInfo("w", "g", "fp")),),
        (Challenge(PROTOCOL - 1, "n", "p"),),
        (Hello(2, WorkerInfo("w", "g", "fp")),),
        (Shutdown("x" * 3000),),
        (Shutdown("x" * 30000),),
    ],
)
async def test_who_cannot_prove_itself_gets_no_token_no_proof_and_no_prompt(messages: tuple[object]) -> None:
    first, *rest = await answers(*messages)
    assert isinstance(first, Join) and all(isinstance(m, Shutdown) for m in rest)


async def test_the_proof_of_a_worker_elsewhere_cannot_be_passed_on() -> None:
    """A lease of somebody's own, who asks the true worker for whatever it is asked for."""
    async with running() as worker:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs, ours = await asyncio.open_connection(worker.host, worker.port)

            async def back() -> None:
                while data := await theirs.read(65536):
                    writer.write(data)

            task = asyncio.create_task(back())
            while data := await reader.read(65536):
                ours.write(data)
            await asyncio.sleep(0.02)
            ours.close()
            await task

        async with rogue(relay) as (host, port, heard):
            with pytest.raises(UserError, match=f"{port} does not prove to know"):
                await SocketClient.connect(host, port, TOKEN)
        kinds = [type(m) for m in to_worker_reader().feed(bytes(heard))]
        assert kinds == [Join, Shutdown]


async def exchange(worker: Running, *messages: object, until: type | None = None) -> list[object]:
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    for message in messages:
        writer.write(frame(message))
    frames, got = from_worker_reader(), list[object]()
    async with asyncio.timeout(10):
        while not any(isinstance(m, until or Shutdown) for m in got) and (data := await reader.read(65536)):
            got += frames.feed(data)
    writer.close()
    return got


async def test_what_was_recorded_proves_nothing_later() -> None:
    async with running() as worker:
        said = bytearray()
        send = SocketClient._write

        def recorded(self: SocketClient, data: bytearray) -> None:
            said.extend(data)
            send(self, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SocketClient, "_write", recorded)
            client, _ = await worker.connect()
        await client.close()
        join, shown = to_worker_reader().feed(bytes(said))
        assert isinstance(join, Join) and isinstance(shown, Proof) and TOKEN.encode() not in said
        *_, last = await exchange(worker, join, shown, Submit(1, GenerateRequest("r", TokenIds.of([1]))))
        assert isinstance(last, Shutdown) and "wrong proof" in last.reason
        challenge, *_ = await exchange(worker, join, until=Challenge)
    # And the worker's own, to the next gateway.
    first, *rest = await answers(challenge)
    assert isinstance(first, Join) and all(isinstance(m, Shutdown) for m in rest)


async def test_the_worker_s_own_proof_is_not_the_gateway_s() -> None:
    async with running() as worker:
        reader, writer = await asyncio.open_connection(worker.host, worker.port)
        writer.write(frame(Join(PROTOCOL, "n")))
        (challenge,) = from_worker_reader().feed(await reader.read(65536))
        assert isinstance(challenge, Challenge)
        writer.write(frame(Proof(challenge.proof)))
        (last,) = from_worker_reader().feed(await reader.read(65536))
        assert isinstance(last, Shutdown) and "wrong proof" in last.reason
        writer.close()


async def test_a_wrong_secret_is_named_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as worker:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(UserError, match=r"gateway\.secret.* is another"),
        ):
            await SocketClient.connect(worker.host, worker.port, "guess")
        async with asyncio.timeout(10):
            while "gateway.secret" not in caplog.text:
                await asyncio.sleep(0.005)
        [said] = [r.getMessage() for r in caplog.records if "gateway.secret" in r.getMessage()]
        assert "somebody at 127.0.0.1:" in said and "guess" not in said
        client, _ = await worker.connect()  # and it serves on: nobody's goodbye ends it
        await client.close()


@pytest.mark.parametrize(
    ("host", "port"), [("x" * 70, 1), ("a\0b", 1), ("127.0.0.1", 70000), ("127.0.0.1", -1), ("ü..", 1)]
)
async def test_what_is_no_address_is_a_resource_error(host: str, port: int) -> None:
    with pytest.raises(ResourceError):
        await SocketClient.connect(host, port, TOKEN)


async def test_a_token_of_its_own_for_every_server() -> None:
    server = Server(WorkerInfo("w", "g", "fp"), "other")
    await server.listen("127.0.0.1", 0)
    host, _, port = server._address.rpartition(":")
    with pytest.raises(UserError, match="does not prove"):
        await SocketClient.connect(host, int(port), TOKEN)
    await server.close("over")
