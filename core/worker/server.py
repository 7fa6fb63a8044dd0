"""The I/O side of a worker: gateways that connect, their requests, and the frames they get."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from bien.core.errors import ResourceError, UserError
from bien.core.kv.events import KVEvent
from bien.core.report import StepReport
from bien.core.request import GenerateRequest
from bien.core.worker.engine_rank import STOPPED, EngineRank
from bien.core.worker.handshake import Meeting, new_nonce, proof, proves
from bien.core.worker.mapping import RequestMap, duplicate, error_output
from bien.core.worker.messages import (
    PROTOCOL,
    Abort,
    Challenge,
    FromWorker,
    Hello,
    Join,
    Ping,
    Pong,
    PromptPart,
    Proof,
    Shutdown,
    SnapshotRequest,
    StepFrame,
    Submit,
    ToWorker,
    WorkerInfo,
    WorkerStats,
)
from bien.core.worker.parts import Assembler, check_packing
from bien.core.worker.wire import MAX_TO_WORKER, WireError, frame, to_worker_reader, tune

if TYPE_CHECKING:
    from bien.core.worker.publisher import Publisher

PUBLISHER = 0  # in place of a gateway's number
JOIN_SECONDS = 10.0  # how long a peer may take to say who it is
OTHER_SECRET = "gateway.secret, or the index's namespace, is another one there"
MAX_UNSENT = 512 << 20  # bytes waiting for a gateway that does not read; more: it is dropped
log = logging.getLogger("bien.worker")


class Server:
    """Lives on the event loop; is the `RankListener` of its engines."""

    def __init__(self, info: WorkerInfo, token: str) -> None:
        self.info = info
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # with the reason
        self.ranks = [EngineRank(info, number, self) for number in range(info.dp_ranks)]
        self.publisher: Publisher | None = None  # set by `run`, where the worker publishes
        self._token = token
        self._address = ""  # as it is announced
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server | None = None
        self._gateways: dict[int, _Gateway] = {}  # those that have joined
        self._count = 0
        self._requests = RequestMap()
        self._places: dict[str, EngineRank] = {}  # of requests that have not ended, by engine id
        self._ended: dict[int, str] = {}  # engines that have stopped, and why

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept gateways; the address. ResourceError when the port cannot be had."""
        try:
            self._listening = await self._loop.create_server(lambda: _Gateway(self), host, port)
        except OSError as error:
            raise ResourceError(
                f"worker {self.info.id!r} cannot listen on {host}:{port}: {error.strerror or error}; "
                f"valid: an address of this machine and a free port, or port 0 for any free one"
            ) from None
        address = self._listening.sockets[0].getsockname()
        self._address = f"{address[0]}:{address[1]}"
        return address[0], address[1]

    def stop(self, reason: str) -> None:
        """Ask the engines to stop; `stopped` is set once all have."""
        log.info("stopping: %s", reason)
        for rank in self.ranks:
            rank.engine.stop()

    async def close(self, reason: str) -> None:
        """Say goodbye to every gateway and let the last bytes out."""
        if self._listening is not None:
            self._listening.close()
        for gateway in list(self._gateways.values()):
            gateway.refuse(reason)
        for _ in range(100):
            if not self._gateways:
                return
            await asyncio.sleep(0.005)

    # What gateways ask for.

    def challenge(self, gateway: _Gateway, message: Join) -> Meeting:
        """Prove that this is the worker. WireError: another protocol."""
        if message.protocol != PROTOCOL:
            raise WireError(f"protocol {message.protocol} is not spoken here; valid: {PROTOCOL}")
        meeting = Meeting(self._address, message.nonce, new_nonce())
        gateway.send(Challenge(PROTOCOL, meeting.worker, proof("worker", self._token, meeting)))
        return meeting

    def join(self, gateway: _Gateway, meeting: Meeting, message: Proof) -> None:
        """WireError: it does not know the token."""
        if not proves(message.proof, "gateway", self._token, meeting):
            raise WireError(f"wrong proof: {OTHER_SECRET}")
        self._count += 1
        gateway.client = self._count
        self._gateways[gateway.client] = gateway
        if self.publisher is not None:
            self._mark(self.publisher)  # before it can begin to read what is stored
        gateway.send(Hello(PROTOCOL, self.info))
        for rank in self.ranks:
            unseen = rank.newest.ahead_of(gateway.client)
            gateway.send(StepFrame(stats=rank.stats, dp_rank=rank.number, unseen=unseen))

    def submit(self, client: int, rid: int, request: GenerateRequest) -> None:
        try:
            rank = self.rank(request.dp_rank)
            check_packing(request.prompt)
            accepted = self._requests.add(client, rid, request)
        except UserError as error:
            self.refuse(client, rid, error)
        else:
            self._places[accepted.id] = rank
            rank.engine.submit(accepted)
            tokens = len(request.prompt) - request.predicted_cached_tokens
            rank.newest.add(accepted.id, client, max(1, tokens))
            for other, gateway in self._gateways.items():
                if other != client:
                    gateway.send(StepFrame(dp_rank=rank.number, unseen=rank.newest.ahead_of(other)))

    def rank(self, number: int) -> EngineRank:
        """UserError: there is none."""
        if not 0 <= number < len(self.ranks):
            raise UserError(f"dp_rank is {number}; valid: 0 to {len(self.ranks) - 1}", field="dp_rank")
        return self.ranks[number]

    def refuse(self, client: int, rid: int, error: UserError) -> None:
        """End whatever goes by this rid with an error."""
        self.abort(client, rid)
        self._fail(client, rid, error)

    def abort(self, client: int, rid: int) -> None:
        id = self._requests.remove(client, rid)
        if id is not None:
            self._leave(id)

    def lost(self, client: int) -> None:
        """A gateway is gone; so are its requests."""
        del self._gateways[client]
        ids = self._requests.drop(client)
        for id in ids:
            self._leave(id)
        log.info("gateway %d left; %d requests aborted", client, len(ids))

    # RankListener

    def report(self, rank: EngineRank, report: StepReport, stats: WorkerStats, received: int) -> None:
        rank.stats = stats
        rank.newest.reported(report.outputs, stats.queued_tokens, received)
        for output in report.outputs:
            if output.finish is not None:
                self._places.pop(output.id, None)
        for client, message in rank.frames.frames(report, stats, self._gateways, self._requests).items():
            message.unseen = rank.newest.ahead_of(client)
            self._gateways[client].send(message)
        if self.publisher is not None and rank.frames.batch is not None:
            self.publisher.add(rank.frames.batch)

    def refused(self, rank: EngineRank, id: str, error: Exception) -> None:
        rank.newest.remove(id)
        self._places.pop(id, None)
        owner = self._requests.owner(id)
        if owner is not None:
            self._requests.remove(*owner)
            self._fail(*owner, error)

    def snapshot(self, rank: EngineRank, client: int, events: list[KVEvent]) -> None:
        if client == PUBLISHER and self.publisher is not None:
            self.publisher.snapshot(rank.frames.snapshot(events))
        if client in self._gateways:
            self._gateways[client].send(rank.frames.snapshot(events))

    def ended(self, rank: EngineRank, reason: str) -> None:
        """The others do not go on without it: a worker lives and dies as one."""
        if not self._ended:
            for other in self.ranks:
                other.engine.stop()
        self._ended[rank.number] = reason
        if len(self._ended) == len(self.ranks) and not self.stopped.done():
            failed = [why for why in self._ended.values() if why != STOPPED]
            self.stopped.set_result(failed[0] if failed else STOPPED)

    def _mark(self, publisher: Publisher) -> None:
        """Whoever joined starts from what is published, which is a little behind: batches that wait to be
        written, or had to be dropped, it has not had as frames. They are written now; and as nothing more may
        come for long, every rank says where it is."""
        for rank in self.ranks:
            batch = rank.frames.mark()
            for gateway in self._gateways.values():
                gateway.send(StepFrame(batch=batch, dp_rank=rank.number))
            publisher.add(batch)
        publisher.hurry()

    def _leave(self, id: str) -> None:
        rank = self._places.pop(id)
        rank.newest.remove(id)
        rank.engine.abort(id)

    def _fail(self, client: int, rid: int, error: Exception) -> None:
        self._gateways[client].send(StepFrame([error_output(rid, error)]))


class _Gateway(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: Server) -> None:
        self.client = 0  # number of the gateway once it has joined
        self._server = server
        self._meeting: Meeting | None = None  # once it has been asked for its proof
        self._reader = to_worker_reader()
        self._assembler = Assembler()
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        tune(transport)
        self._deadline = asyncio.get_running_loop().call_later(JOIN_SECONDS, self.refuse, "no join in time")

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._refused = True
        if self.client:
            self._server.lost(self.client)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                if self._refused:
                    return
                self._on_message(message)
        except WireError as error:
            self.refuse(str(error))

    def send(self, message: FromWorker) -> None:
        if self._refused:
            return
        self._transport.write(frame(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self._refused = True
            log.warning("gateway %d does not read; its connection is closed", self.client)
            self._transport.abort()

    def refuse(self, reason: str) -> None:
        """Close the connection, with the reason as its last frame."""
        if not self._refused:
            who = f"gateway {self.client}" if self.client else f"somebody at {self._peer}, not joined,"
            log.log(
                logging.INFO if self.client else logging.WARNING, "connection of %s closed: %s", who, reason
            )
            self.send(Shutdown(reason))
            self._refused = True
            self._transport.close()

    def _on_message(self, message: ToWorker) -> None:
        if not self.client:
            self._introduce(message)
            return
        match message:
            case Submit() if message.rid in self._assembler:
                self._assembler.drop(message.rid)
                self._server.refuse(self.client, message.rid, duplicate(message.rid))
            case Submit(prompt_bytes=0):
                self._server.submit(self.client, message.rid, message.request)
            case Submit():
                self._assembler.start(message)
            case PromptPart():
                request = self._assembler.add(message)
                if request is not None:
                    self._server.submit(self.client, message.rid, request)
            case Abort():
                self._assembler.drop(message.rid)
                self._server.abort(self.client, message.rid)
            case Ping():
                self.send(Pong(message.number))
            case SnapshotRequest():
                try:
                    self._server.rank(message.dp_rank).engine.snapshot(self.client)
                except UserError as error:
                    raise WireError(str(error)) from None
            case Shutdown():
                self._server.stop(message.reason or "a gateway asked for it")
            case Join() | Proof():
                raise WireError("joined already")

    def _introduce(self, message: ToWorker) -> None:
        match message:
            case Join() if self._meeting is None:
                self._meeting = self._server.challenge(self, message)
            case Proof() if self._meeting is not None:
                self._server.join(self, self._meeting, message)
                self._deadline.cancel()
                self._reader.limit = MAX_TO_WORKER
            case Shutdown() if self._meeting is not None:
                self.refuse(f"it does not take this for the worker that it looked for: {OTHER_SECRET}")
            case _ if self._meeting is None:
                raise WireError("the first frame must be a join")
            case _:
                raise WireError("a proof must follow the join")

    @property
    def _peer(self) -> str:
        address = self._transport.get_extra_info("peername") or ("an unknown address",)
        return ":".join(map(str, address[:2]))
