"""`Processes`: the worker processes of a stack; one that dies is started again, and joins again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from bien.core.clock import Clock, WallClock
from bien.core.errors import ResourceError
from bien.core.worker.client import WorkerClient
from bien.core.worker.launch import WorkerProcess
from bien.core.worker.socket_client import SILENCE_SECONDS, SocketClient

OnStep = Callable[[str, str, int, int], None]  # who, what, done, total (0: unknown)
WARNING = "warning"  # as who: what is said then stays to be read
STARTS = 5  # of one worker that fail in a row; then the rest go on without it
BACKOFF = 1.0  # seconds before the second restart, doubled for each one after it
LONGEST = 30.0  # most seconds before a restart: who died young may be needed, and may live now
STEADY = 30.0  # seconds of life after which the deaths before are forgotten
CHECK = 1.0  # seconds between looks at connections; one that is gone at two of them is made again
REACH = 60.0  # seconds for which a process that lives is asked to take a connection, until it is ended
GRACE = 2.0  # seconds that workers get to stop, those with ranks of their own among them
log = logging.getLogger("bien.stack")


class Joins(Protocol):
    """The part of a gateway that takes in a worker that came back, with an empty cache."""

    def join(self, client: WorkerClient) -> None: ...


async def connect(worker: WorkerProcess, silence: float = SILENCE_SECONDS) -> WorkerClient:
    ready = worker.ready
    return await SocketClient.connect(ready.host, ready.port, worker.start.token, silence=silence)


class Processes:
    def __init__(
        self,
        workers: list[WorkerProcess],
        connect: Callable[[WorkerProcess], Awaitable[WorkerClient]] = connect,
        clock: Clock | None = None,
    ) -> None:
        self._workers = workers
        self._connect = connect
        self._clock = clock or WallClock()
        self._watches: list[asyncio.Task[None]] = []
        # Of the workers, once they have joined; None where gateways connect by themselves.
        self._clients: list[WorkerClient | None] = [None] * len(workers)

    async def connect(self) -> list[WorkerClient]:
        clients = [await self._connect(worker) for worker in self._workers]
        self._clients = [*clients]
        return clients

    def watch(self, gateway: Joins, on_step: OnStep) -> None:
        """From now on, until `stop`."""
        for index in range(len(self._workers)):
            self._watches.append(asyncio.create_task(self._watch(index, gateway, on_step)))

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(worker.stop(GRACE) for worker in self._workers))

    async def _watch(self, index: int, gateway: Joins, on_step: OnStep) -> None:
        id = self._workers[index].start.id
        attempts = 0
        while True:
            born = self._clock.time()
            reason = await self._end(index, gateway)
            if self._clock.time() - born >= STEADY:
                attempts = 0
            for failures in range(STARTS + 1):
                if failures == STARTS:
                    on_step(id, f"{reason}; given up after {failures} attempts to start it again", 0, 0)
                    return
                # The first one comes at once: a death by chance should cost as little as it can.
                pause = min(BACKOFF * 2 ** (attempts - 1), LONGEST) if attempts else 0.0
                when = f"starting it again in {pause:g} s" if pause else "starting it again"
                on_step(id, f"died: {reason}; {when}", 0, 0)
                await self._clock.sleep(pause)
                attempts += 1
                try:
                    # The latest process, not the one that died: it may have been replaced by one that
                    # never joined.
                    self._workers[index] = await self._workers[index].respawn()
                    await self._join(index, gateway)
                    on_step(id, "is back", 0, 0)
                    break
                except Exception as error:  # of any kind: nobody else would start it
                    reason = f"worker {id!r} cannot be started again: {error!r}"

    async def _end(self, index: int, gateway: Joins) -> str:
        """Wait for the end of a process, and why it came. A lost connection to one that lives is made
        again, as soon as it answers: one that was stopped, or on a host without memory, keeps its cache."""
        worker, gone, lost = self._workers[index], False, -1.0
        ended = asyncio.ensure_future(worker.wait())
        try:
            while True:
                await self._first(ended, CHECK)
                if ended.done():
                    return ended.result()
                if gone and self._gone(index):
                    now = self._clock.time()
                    if lost < 0:
                        lost = now
                        log.warning("the connection to worker %r was lost; making it again", worker.start.id)
                    try:
                        await self._join(index, gateway)
                        lost = -1.0
                    except ResourceError as error:  # it may be hung, and may go on
                        if self._clock.time() - lost < REACH:
                            log.info("worker %r cannot be reached yet: %s", worker.start.id, error)
                            continue
                        log.error("worker %r cannot be reached: %s; it is ended", worker.start.id, error)
                        await worker.stop(GRACE)
                        return await ended
                    except Exception:
                        log.exception("worker %r cannot be reached; it is ended", worker.start.id)
                        await worker.stop(GRACE)
                        return await ended
                gone = self._gone(index)
        finally:
            ended.cancel()

    def _gone(self, index: int) -> bool:
        client = self._clients[index]
        return client is not None and not client.alive

    async def _first(self, ended: asyncio.Future[str], seconds: float) -> None:
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            waiting: set[asyncio.Future[Any]] = {ended, sleep}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()

    async def _join(self, index: int, gateway: Joins) -> None:
        client = await self._connect(self._workers[index])
        try:
            gateway.join(client)
        except BaseException:
            await client.close()
            raise
        self._clients[index] = client
