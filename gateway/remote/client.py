"""`RemoteClient`: a `WorkerClient` whose worker is somebody else's server."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import Any

import msgspec

from bien.core.clock import Clock
from bien.core.errors import BienError, ContextLengthError, WorkerDiedError
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import extend_chain
from bien.core.request import GenerateRequest, TokenIds
from bien.core.worker.client import WorkerListener
from bien.core.worker.mapping import duplicate, error_output
from bien.core.worker.messages import Output, Snapshot, StepFrame, WorkerInfo
from bien.gateway.remote.alarms import EventWatch
from bien.gateway.remote.answer import DONE, Answer, Cut
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.dialect import Dialect, salt_of
from bien.gateway.remote.endpoint import Endpoint
from bien.gateway.remote.follow import Follower, Source
from bien.gateway.remote.history import History
from bien.gateway.remote.load import Load
from bien.gateway.remote.server import HttpServer, Silent, Unreachable

FAILURES = 2  # looks at its health in a row that fail: it is dead
SURELY = 256  # computed tokens that fill a block of any engine
MAX_TENANTS = 100_000  # whose salts are remembered
log = logging.getLogger("bien.remote")


class RemoteClient:
    """Made by `connect`; used on the event loop only."""

    info: WorkerInfo

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, dialect: Dialect, clock: Clock, watch: EventWatch, source: Source | None
    ) -> RemoteClient:
        """`source`: its KV events, which the client closes. ResourceError: it cannot be reached.
        UserError: it is not what the deployment says."""
        server = HttpServer(endpoint, dialect)
        try:
            name, context = await server.card()
            readings = await server.look()
        except BaseException:
            await server.close()
            if source is not None:
                await source.close()
            raise
        capacity = endpoint.capacity_tokens or (readings.blocks or 0) * (readings.block_tokens or 0)
        boot = secrets.token_hex(8)
        whole = (readings.block_tokens or 0) % endpoint.block_tokens == 0
        info = WorkerInfo(
            id=endpoint.id,
            generation=f"{boot}.0",
            fp=f"remote/{name}/{endpoint.block_tokens}",
            model=endpoint.model,
            block_tokens=endpoint.block_tokens,
            max_context=context,
            capacity_tokens=capacity,
            group_kinds=endpoint.group_kinds,
            group_windows=endpoint.group_windows,
            snapshot_tokens=(0,) * len(endpoint.groups),
            tiers=("device", "host", "disk") if source is not None else ("device",),
            cached_in=(readings.block_tokens or 0) if whole else 0,
            refuses=dialect.refuses,
        )
        return cls(info, name, server, clock, watch, source)

    def __init__(
        self,
        info: WorkerInfo,
        name: str,
        server: HttpServer,
        clock: Clock,
        watch: EventWatch,
        source: Source | None,
    ) -> None:
        self.info = info
        self._name = name
        self._server = server
        self._endpoint = endpoint = server.endpoint
        self._clock = clock
        self._watch = watch
        self._source = source
        self._alive = True
        self._reason = ""
        self._listener: WorkerListener | None = None
        self._boot, self._life, self._seq = info.generation.split(".")[0], 0, 0
        self._salts: dict[str, bytes] = {}  # what tenants' requests carry -> the key of their chains
        self._load = Load()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups = [
            BlockMap(info.block_tokens, self._key_of, group) for group in range(len(info.group_kinds))
        ]
        self._history = None if source is not None else self._new_history()
        self._follower: Follower | None = None
        if source is not None:
            self._follower = Follower(
                source, self._groups, info.group_kinds, endpoint.rank or 0, watch, self._emit, self._renew
            )
            self._start(self._follower.run(), "events")
        self._start(self._poll(), "poll")

    # WorkerClient

    @property
    def alive(self) -> bool:
        return self._alive

    def attach(self, listener: WorkerListener) -> None:
        self._listener = listener
        if not self._alive:  # it died between connecting and this
            asyncio.get_running_loop().call_soon(listener.on_death, self, self._reason)

    def submit(self, rid: int, request: GenerateRequest) -> None:
        if not self._alive:
            return
        if rid in self._calls:
            self.abort(rid)
            self._send(error_output(rid, duplicate(rid)))
            return
        uncached = max(0, request.prompt_tokens - request.predicted_cached_tokens)
        self._load.add(rid, request.prompt_tokens, uncached, self._clock.time())
        call = asyncio.get_running_loop().create_task(self._call(rid, request), name=f"{self.info.id} {rid}")
        self._calls[rid] = call

    def abort(self, rid: int) -> None:
        call = self._calls.pop(rid, None)
        if call is not None:
            call.cancel()
            self._load.remove(rid, self._clock.time())
            if not self._calls:
                asyncio.get_running_loop().call_soon(self._send)

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        if self._follower is not None:
            await self._follower.ready.wait()
        if not self._alive:
            raise WorkerDiedError(f"worker {self.info.id!r} is gone: {self._reason}")
        if self._history is not None:
            events = self._history.snapshot()
        else:
            events = [event for group in self._groups for event in group.snapshot()]
        return Snapshot(self._generation, self._seq, events)

    def catch_up(self) -> None:
        """Nothing to do: the server's clock runs by itself."""

    async def close(self) -> None:
        self._end("closed by this gateway")
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # One generation.

    async def _call(self, rid: int, request: GenerateRequest) -> None:
        try:
            await self._generate(rid, request)
        except BienError as error:
            self._over(rid, error_output(rid, error))
        except Exception as error:
            log.exception("worker %s: request %s failed", self.info.id, request.id)
            self._over(rid, error_output(rid, BienError(f"{type(error).__name__}: {error}")))

    async def _generate(self, rid: int, request: GenerateRequest) -> None:
        need, room = request.prompt_tokens + request.sampling.max_tokens, self.info.max_context
        if need > room:
            raise ContextLengthError(
                f"{request.prompt_tokens} prompt tokens and max_tokens {request.sampling.max_tokens} are "
                f"more than the context of worker {self.info.id} holds; valid: {room} tokens in all"
            )
        salt = self._salt(request)
        body = self._server.dialect.body(self._name, request, self._endpoint.rank, salt)
        for attempt in range(2):
            answer = Answer(rid)
            try:
                await self._stream(body, answer, request)
                return
            except (Unreachable, Silent, Cut) as error:
                if why := await self._server.healthy():
                    self._die(f"the connection to {self._endpoint.url} was lost ({error or 'cut'}): {why}")
                    return
                # It lives: a connection that it had closed, or a proxy's between. Once more, if nobody has
                # had anything of it; who has waited so long already does not wait so long again.
                if answer.begun or attempt or isinstance(error, Silent):
                    text = f"the engine of worker {self.info.id} cut the answer off"
                    said = f" ({error})" if str(error) else ""
                    raise WorkerDiedError(f"{text} after {answer.tokens} tokens{said}") from None

    async def _stream(self, body: dict[str, Any], answer: Answer, request: GenerateRequest) -> None:
        async with self._server.ask(body) as stream:
            async for data in stream:
                if data == DONE:
                    break
                try:
                    output = answer.take(self._server.dialect.read(data))
                except msgspec.DecodeError as error:
                    raise BienError(f"the engine answers with {data[:80]!r}: {error}") from None
                if output is not None:
                    self._gained(output, request)
            last = answer.end()
        self._learn(answer, request)
        self._gained(last, request, last=True)

    def _gained(self, output: Output, request: GenerateRequest, last: bool = False) -> None:
        rid = output.rid
        if rid not in self._calls:
            return
        first = not self._load.works[rid].started
        self._load.gained(rid, output.count)
        if first and self._history is not None:
            self._emit(self._history.used(request.hashes, self._clock.time()))
        if last:
            self._over(rid, output)
        else:
            self._send(output, stats=first)

    def _learn(self, answer: Answer, request: GenerateRequest) -> None:
        """What a whole answer says of the engine's cache."""
        cached = -1 if answer.usage is None else answer.usage.cached
        if self._history is not None:
            made = TokenIds(answer.ids)
            if made and isinstance(request.prompt, TokenIds):
                whole = request.prompt.join(made.slice(0, len(made) - 1))  # the last one was never fed back
                block = self.info.block_tokens
                hashes = extend_chain(request.hash_key, request.hashes, whole, block, len(whole))
                self._emit(self._history.used(hashes, self._clock.time()))
        elif cached >= 0:
            if request.prompt_tokens - cached >= SURELY:
                self._watch.owed()
        elif not self._watch.counts.messages:
            self._watch.owed()

    def _over(self, rid: int, output: Output) -> None:
        if self._calls.pop(rid, None) is not None:
            self._load.remove(rid, self._clock.time(), output.cached)
            self._send(output)

    # Salts.

    def _salt(self, request: GenerateRequest) -> str:
        if not (request.tenant or request.salt) or not self._endpoint.salt:
            return ""
        salt = salt_of(request.hash_key)
        if salt not in self._salts:
            if len(self._salts) >= MAX_TENANTS:
                self._salts.clear()
            self._salts[salt] = request.hash_key
            if self._follower is not None and any(salt in group.unknown_salts for group in self._groups):
                # Of an earlier life of this gateway, or another one's request.
                self._start(self._follower.relearn(), "relearn")
        return salt

    def _key_of(self, salt: str) -> bytes | None:
        return self._salts.get(salt) if salt else self._endpoint.hash_key

    # Events and load.

    @property
    def _generation(self) -> str:
        return f"{self._boot}.{self._life}"

    def _emit(self, events: list[KVEvent]) -> None:
        if events:
            self._tell(events)

    def _renew(self) -> None:
        """All that the index has of it is void."""
        self._life += 1
        self._seq = 0
        self._tell([])

    def _tell(self, events: list[KVEvent]) -> None:
        self._seq += 1
        batch = EventBatch(self.info.id, 0, self._generation, self._seq, events)
        if self._listener is not None and self._alive:
            self._listener.on_frame(self, StepFrame(batch=batch, time=self._clock.time()))

    def _send(self, *outputs: Output, stats: bool = True) -> None:
        if self._listener is not None and self._alive:
            now = self._clock.time()
            report = self._load.report(now) if stats else None
            self._listener.on_frame(self, StepFrame(list(outputs), None, report, now))

    async def _poll(self) -> None:
        failures = 0
        while True:
            await self._clock.sleep(self._endpoint.poll_seconds)
            try:
                why = await self._server.healthy()
            except Exception as error:  # who asks in a way that nobody foresaw knows no more than before
                why = f"{type(error).__name__}: {error}"
            failures = failures + 1 if why else 0
            if failures >= FAILURES:
                self._die(f"{self._endpoint.url} is not healthy: {why}")
                return
            try:
                await self._look()
            except Exception:  # its requests go on, and the next look may tell more
                log.exception("worker %s: a look at it failed", self.info.id)

    async def _look(self) -> None:
        ours = len(self._load.works)
        self._load.look(await self._server.look(), ours)
        self._watch.check()
        if self._history is not None:
            self._emit(self._history.expire(self._clock.time()))
        self._send()

    def _new_history(self) -> History:
        return History(self._endpoint.history_seconds, self.info.capacity_tokens // self.info.block_tokens)

    # The end.

    def _die(self, reason: str) -> None:
        if self._end(reason) and self._listener is not None:
            self._listener.on_death(self, reason)

    def _end(self, reason: str) -> bool:
        if not self._alive:
            return False
        self._alive = False
        self._reason = reason
        mine = asyncio.current_task()
        for task in [*self._calls.values(), *self._tasks]:
            if task is not mine:
                task.cancel()
        closing = asyncio.get_running_loop().create_task(self._release([*self._calls.values(), *self._tasks]))
        self._calls.clear()
        self._tasks = {closing}
        return True

    async def _release(self, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()
        if self._source is not None:
            await self._source.close()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{self.info.id} {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker %s: %s failed", self.info.id, task.get_name(), exc_info=error)
            self._die(f"{type(error).__name__}: {error}")  # a fault of our own
