"""`SocketClient`: a `WorkerClient` over TCP."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

from bien.core.errors import ResourceError, UserError, WorkerDiedError
from bien.core.request import GenerateRequest
from bien.core.worker.client import WorkerListener
from bien.core.worker.handshake import Meeting, new_nonce, proof, proves
from bien.core.worker.messages import (
    PART_BYTES,
    PROTOCOL,
    Abort,
    Challenge,
    FromWorker,
    Hello,
    Join,
    Ping,
    Pong,
    Proof,
    Shutdown,
    Snapshot,
    SnapshotRequest,
    StepFrame,
    WorkerInfo,
)
from bien.core.worker.parts import PartQueue, split
from bien.core.worker.wire import (
    MAX_FROM_WORKER,
    MAX_JOIN,
    WireError,
    frame,
    from_worker_reader,
    tune,
)

BURST = 4  # prompt parts written before other callbacks get their turn
MAX_REASON = 500  # characters from who has not proved itself
CLOSE_SECONDS = 1.0  # for the last frames to leave
SILENCE_SECONDS = 10.0  # without a byte from the worker, which is asked meanwhile, until it is given up
LOOKS = 4  # in that time


class SocketClient(asyncio.Protocol):
    """One connection to one worker. Made by `connect`; used on the event loop only."""

    info: WorkerInfo

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        token: str = "",
        *,
        timeout: float = 10.0,
        silence: float = SILENCE_SECONDS,
    ) -> SocketClient:
        """`silence`: seconds after which a worker that says nothing, and answers nothing, counts as dead; 0:
        never. `host` and `port` as the worker has announced them: they are part of what is proved. UserError:
        refused, with the reason, or who answers there does not know the token, and gets nothing.
        ResourceError: nobody listens there, or no answer in time."""
        loop = asyncio.get_running_loop()
        client = cls(f"{host}:{port}", token, silence)
        try:
            async with asyncio.timeout(timeout):
                await loop.create_connection(lambda: client, host, port)
                client.info = await client._joined
        except TimeoutError:
            raise ResourceError(f"worker at {host}:{port} did not answer in {timeout:g} seconds") from None
        except OSError as error:
            raise ResourceError(f"no worker at {host}:{port}: {error.strerror or error}") from None
        except (ValueError, OverflowError) as error:
            raise ResourceError(f"no worker at {host!r:.80}:{port}, which is no address: {error}") from None
        finally:
            if not client.alive:
                client._drop()
        return client

    def __init__(self, address: str, token: str, silence: float = SILENCE_SECONDS) -> None:
        self._address = address
        self._token = token
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[WorkerInfo] = self._loop.create_future()
        self._nonce = new_nonce()
        self._proved = False  # that it is the worker
        self._refusal: UserError | None = None  # why it is left at once
        self._reader = from_worker_reader()
        self._reader.limit = MAX_JOIN
        self._transport: asyncio.Transport | None = None
        self._listener: WorkerListener | None = None
        self._early: list[StepFrame] = []  # frames that came before `attach`
        self._live: set[int] = set()  # rids that may still get outputs
        self._parts = PartQueue()
        self._pumping = False
        self._paused = False
        # By rank, each of which answers in order.
        self._snapshots: dict[int, deque[asyncio.Future[Snapshot]]] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}  # by number: what is waited for
        self._pinged = 0  # number of the newest
        self._heard = False  # anything since the latest look
        self._silent = 0  # looks in a row at which nothing was heard
        self._look: asyncio.TimerHandle | None = None
        self._reason = ""  # why the connection ended, when known before its end
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._told = False  # the listener knows of the death
        self.alive = False

    # WorkerClient

    def attach(self, listener: WorkerListener) -> None:
        self._listener = listener
        early, self._early = self._early, []
        for step in early:
            listener.on_frame(self, step)
        if self._gone.done() and not self._told:
            self._told = True
            self._loop.call_soon(listener.on_death, self, self._reason)

    def submit(self, rid: int, request: GenerateRequest) -> None:
        if not self.alive:
            return
        submit, rest = split(rid, request)
        data = frame(submit)  # may raise: nothing has happened then
        self._parts.drop(rid)
        self._live.add(rid)
        self._write(data)
        if rest:
            self._parts.add(rid, rest)
            self._pump()

    def abort(self, rid: int) -> None:
        if rid in self._live and self.alive:
            self._live.discard(rid)
            self._parts.drop(rid)
            self._send(Abort(rid))

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        if not self.alive:
            raise WorkerDiedError(f"worker {self.info.id!r} is gone: {self._reason}")
        answer: asyncio.Future[Snapshot] = self._loop.create_future()
        self._snapshots.setdefault(dp_rank, deque()).append(answer)
        self._send(SnapshotRequest(dp_rank))
        return await answer

    async def ping(self) -> None:
        if not self.alive:
            raise WorkerDiedError(f"worker {self.info.id!r} is gone: {self._reason}")
        number = self._ask()
        answer = self._pings[number] = self._loop.create_future()
        try:
            await answer
        finally:
            self._pings.pop(number, None)

    def catch_up(self) -> None:
        """Nothing to do: the worker's clock runs by itself."""

    async def close(self) -> None:
        if self._transport is None:
            return
        self.alive = False  # so that this end is not taken for the worker's
        self._reason = self._reason or "closed by this gateway"
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self._drop()
            await self._gone

    def shutdown(self, reason: str) -> None:
        """Ask the worker process itself to stop."""
        if self.alive:
            self._send(Shutdown(reason))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        tune(transport)
        self._transport.set_write_buffer_limits(high=2 * PART_BYTES)
        self._send(Join(PROTOCOL, self._nonce))

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except WireError as error:
            self._reason = f"worker at {self._address} does not speak this protocol: {error}"
            self._drop()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def connection_lost(self, error: Exception | None) -> None:
        told = self._reason
        lost = f"connection to the worker at {self._address} was lost ({error or 'it hung up'})"
        self._reason = told or lost
        was_alive, self.alive = self.alive, False
        if self._look is not None:
            self._look.cancel()
        if not self._joined.done():
            refused = UserError(f"worker at {self._address} refused this gateway: {told}")
            self._joined.set_exception(self._refusal or (refused if told else ResourceError(self._reason)))
        for answers in self._snapshots.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(WorkerDiedError(self._reason))
        self._snapshots.clear()
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(WorkerDiedError(self._reason))
        if not self._gone.done():
            self._gone.set_result(None)
        if was_alive and self._listener is not None:
            self._told = True
            self._listener.on_death(self, self._reason)

    # private

    def _on_message(self, message: FromWorker) -> None:
        if not self._proved:
            self._meet(message)
            return
        match message:
            case StepFrame():
                self._on_step(message)
            case Snapshot():
                answers = self._snapshots.get(message.dp_rank)
                if answers and not (answer := answers.popleft()).done():
                    answer.set_result(message)
            case Pong():
                ping = self._pings.get(message.number)
                if ping is not None and not ping.done():
                    ping.set_result(None)
            case Hello():
                if message.protocol != PROTOCOL:
                    raise WireError(f"its protocol is {message.protocol}, ours {PROTOCOL}")
                self.alive = True
                if self._silence and self._look is None:
                    self._look = self._loop.call_later(self._silence / LOOKS, self._listen)
                if not self._joined.done():
                    self._joined.set_result(message.info)
            case Shutdown():
                self._reason = message.reason
                self._drop()
            case Challenge():
                raise WireError("it proves itself twice")

    def _meet(self, message: FromWorker) -> None:
        """Nothing of ours goes there, and nothing of it counts here, before it has proved itself."""
        match message:
            case _ if self._refusal is not None:
                pass
            case Challenge():
                if message.protocol != PROTOCOL:
                    raise WireError(f"its protocol is {message.protocol}, ours {PROTOCOL}")
                meeting = Meeting(self._address, self._nonce, message.nonce)
                if not proves(message.proof, "worker", self._token, meeting):
                    self._refuse()
                    return
                self._proved, self._reader.limit = True, MAX_FROM_WORKER
                self._send(Proof(proof("gateway", self._token, meeting)))
            case Shutdown():
                self._reason = message.reason[:MAX_REASON]
                self._drop()
            case _:
                raise WireError("it has not proved itself")

    def _refuse(self) -> None:
        self._refusal = UserError(
            f"who answers at {self._address} does not prove to know this deployment's token, and was told "
            "nothing: gateway.secret, or the index's namespace, is another one there, or it is no worker of "
            "this deployment"
        )
        self._send(Shutdown("wrong proof"))
        assert self._transport is not None
        self._transport.close()  # once that is out

    def _on_step(self, step: StepFrame) -> None:
        if step.outputs:
            live = self._live
            # An abort may have crossed outputs that were on their way.
            step.outputs = [output for output in step.outputs if output.rid in live]
            for output in step.outputs:
                if output.finish is not None:
                    live.discard(output.rid)
                    self._parts.drop(output.rid)
        if self._listener is None:
            self._early.append(step)
        else:
            self._listener.on_frame(self, step)

    def _listen(self) -> None:
        """Is it still there? It is given up after so many looks, not at a time: if this process stood still
        itself, one look has passed, and what came meanwhile is read before the next."""
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if self._silent > LOOKS:  # at the first of these it was asked
            self._reason = f"it has not answered for {self._silence:g} seconds"
            self._drop()
            return
        if self._silent:
            self._ask()
        self._look = self._loop.call_later(self._silence / LOOKS, self._listen)

    def _ask(self) -> int:
        self._pinged += 1
        self._send(Ping(self._pinged))
        return self._pinged

    def _send(self, message: object) -> None:
        self._write(frame(message))

    def _write(self, data: bytearray) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _pump(self) -> None:
        """Write prompt parts while the connection takes them, other frames passing in between."""
        if not self._pumping and not self._paused and self._parts:
            self._pumping = True
            self._loop.call_soon(self._burst)

    def _burst(self) -> None:
        self._pumping = False
        for _ in range(BURST):
            if self._paused or not self._parts or not self.alive:
                return
            self._send(self._parts.pop())
        self._pump()

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()
