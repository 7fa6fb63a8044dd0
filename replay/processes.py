"""`Processes`: the worker processes of a stack; one that dies is started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from bien.core.clock import Clock, WallClock
from bien.core.worker.client import WorkerClient
from bien.core.worker.launch import WorkerProcess
from bien.core.worker.socket_client import SocketClient

OnStep = Callable[[str, str, int, int], None]  # who, what, done, total (0: unknown)
WARNING = "warning"  # as who: what is said then stays to be read
RESTARTS = 5  # of one worker that never lived for STEADY seconds; then the rest go on without it
BACKOFF = 1.0  # seconds before the second of them, doubled for each one after it
STEADY = 30.0  # seconds of life after which the deaths before are forgotten
GRACE = 0.75  # seconds that workers get to stop
log = logging.getLogger("bien.stack")


class Joins(Protocol):
    """The part of a gateway that takes in a worker that came back, with an empty cache."""

    def join(self, client: WorkerClient) -> None: ...


async def connect(worker: WorkerProcess) -> WorkerClient:
    return await SocketClient.connect(worker.ready.host, worker.ready.port, worker.start.token)


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

    async def connect(self) -> list[WorkerClient]:
        return [await self._connect(worker) for worker in self._workers]

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
            reason = await self._workers[index].wait()
            if self._clock.time() - born >= STEADY:
                attempts = 0
            back = False
            while not back:
                if attempts == RESTARTS:
                    log.error("%s; given up after %d attempts to start it again", reason, attempts)
                    on_step(id, f"given up after {attempts} attempts", 0, 0)
                    return
                # The first one comes at once: a death by chance should cost as little as it can.
                pause = BACKOFF * 2 ** (attempts - 1) if attempts else 0.0
                when = f"starting it again in {pause:g} s" if pause else "starting it again"
                log.warning("%s; %s", reason, when)
                on_step(id, f"died: {reason}; {when}", 0, 0)
                await self._clock.sleep(pause)
                attempts += 1
                try:
                    await self._restart(index, gateway)
                    back = True
                    on_step(id, "is back", 0, 0)
                except Exception as error:  # of any kind: nobody else would start it
                    reason = f"worker {id!r} cannot be started again: {error!r}"

    async def _restart(self, index: int, gateway: Joins) -> None:
        # The latest process, not the one that died: that may have been replaced by one that never joined.
        self._workers[index] = await self._workers[index].respawn()
        client = await self._connect(self._workers[index])
        try:
            gateway.join(client)
        except BaseException:
            await client.close()
            raise
