"""`Finder`: workers that this gateway has not started, by the leases that they hold in the index's store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from bien.core.clock import Clock
from bien.core.errors import BienError, ResourceError
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.published import Lease
from bien.gateway.core import Gateway
from bien.gateway.index import DurableIndex

PAUSE = 0.5  # seconds between looks until there is a worker, and before one is tried again
WATCH = 1.0  # between looks for more
BACKOFF = 30.0  # the longest pause before the same worker is tried again
PATIENCE = 1.0  # seconds that a look waits for workers that do not answer; the next one finds them
log = logging.getLogger("bien.gateway")


class Finder:
    def __init__(
        self,
        index: DurableIndex,
        connect: Callable[[Lease], Awaitable[WorkerClient]],
        clock: Clock,
        wanted: Callable[[WorkerInfo], bool] = lambda info: True,
    ) -> None:
        """`connect` raises BienError when the worker does not answer or refuses; `wanted` leaves out those of
        other deployments."""
        self._index = index
        self._connect = connect
        self._clock = clock
        self._wanted = wanted
        self._tried: dict[tuple[str, str], tuple[float, float]] = {}  # (id, generation) -> next try, pause
        self._reaching: dict[tuple[str, str], asyncio.Task[WorkerClient | None]] = {}
        self._why = ""  # of the newest connection that failed
        self._task: asyncio.Task[None] | None = None

    async def first(self, seconds: float) -> list[WorkerClient]:
        """Those that can be had now; waits until there is one. ResourceError: there is none in time."""
        try:
            async with asyncio.timeout(seconds):
                while not (clients := await self._look(set())):
                    await self._clock.sleep(PAUSE)
                return clients
        except TimeoutError:
            health = self._index.health
            why = self._why or health.reason or "none of this deployment holds a lease"
            raise ResourceError(f"no worker was found within {seconds:g} seconds: {why}") from None

    def watch(self, gateway: Gateway) -> None:
        """From now on, until `close`: workers that appear join."""
        self._task = asyncio.create_task(self._watch(gateway), name="finder")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        tasks, self._reaching = list(self._reaching.values()), {}
        for task in tasks:
            task.cancel()
        for client in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(client, BaseException) and client is not None:
                await client.close()

    async def _watch(self, gateway: Gateway) -> None:
        while True:
            await self._clock.sleep(WATCH)
            try:
                for client in await self._look({(i.id, i.generation) for i in gateway.connected}):
                    await self._join(gateway, client)
            except Exception:  # nobody else would find workers
                log.exception("looking for workers failed")

    async def _join(self, gateway: Gateway, client: WorkerClient) -> None:
        try:
            gateway.join(client)
            log.warning("worker %s joined", client.info.id)
        except BienError as error:
            self._failed((client.info.id, client.info.generation), error)
            await client.close()

    async def _look(self, known: set[tuple[str, str]]) -> list[WorkerClient]:
        now = self._clock.time()
        leases = [lease for lease in await self._index.leases() if self._wanted(lease.info)]
        alive = {(lease.info.id, lease.info.generation) for lease in leases}
        self._tried = {key: tried for key, tried in self._tried.items() if key in alive}
        due = [
            lease
            for lease in leases
            if (key := (lease.info.id, lease.info.generation)) not in known
            and self._tried.get(key, (0.0, 0.0))[0] <= now
        ]
        for lease in due:
            key = lease.info.id, lease.info.generation
            if key not in self._reaching:
                self._reaching[key] = asyncio.create_task(self._reach(lease))
        if self._reaching:
            await asyncio.wait(self._reaching.values(), timeout=PATIENCE)
        over = [key for key, task in self._reaching.items() if task.done()]
        found = [self._reaching.pop(key).result() for key in over]
        return [client for client in found if client is not None]

    async def _reach(self, lease: Lease) -> WorkerClient | None:
        """None: it is not there, or not the one that the lease names. Raises nothing: there are others."""
        key = lease.info.id, lease.info.generation
        try:
            client = await self._connect(lease)
            if (client.info.id, client.info.generation) != key:
                await client.close()
                raise BienError(f"its lease leads to worker {client.info.id!r} of another life or name")
        except BienError as error:
            self._failed(key, error)
            return None
        except Exception as error:
            log.exception("worker %s cannot be reached", key[0])
            self._failed(key, BienError(f"{type(error).__name__}: {error}"))
            return None
        self._tried.pop(key, None)
        return client

    def _failed(self, key: tuple[str, str], error: BienError) -> None:
        _, pause = self._tried.get(key, (0.0, PAUSE))
        self._tried[key] = self._clock.time() + pause, min(2 * pause, BACKOFF)
        if str(error) != self._why:
            self._why = str(error)
            log.warning("worker %s cannot be joined: %s", key[0], error)
