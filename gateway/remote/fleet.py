"""`RemoteFleet`: the remote workers of a deployment: connected, watched, and connected again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from bien.core.clock import Clock
from bien.core.errors import BienError, ResourceError
from bien.core.worker.client import WorkerClient
from bien.gateway.remote.engine import Engine

CHECK = 0.5  # seconds between looks at clients
BACKOFF, LONGEST = 0.5, 15.0  # seconds between attempts to connect
LIVED = 5.0  # seconds after which a connection counts as one that works
log = logging.getLogger("bien.remote")


class Joins(Protocol):
    """The part of a gateway that takes in a worker."""

    def join(self, client: WorkerClient) -> None: ...


class RemoteFleet:
    def __init__(self, engines: Sequence[Engine], clock: Clock) -> None:
        """It owns the engines."""
        self._engines = engines
        self._clock = clock
        self._clients: dict[tuple[Engine, str], WorkerClient] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, say: Callable[[str, str], None]) -> list[WorkerClient]:
        """Those that can be reached now; `say(worker, why)` of the others, which may come later, whatever
        went wrong. Raises what is no matter of time; ResourceError when there are some and none can be
        reached."""
        failed: list[ResourceError] = []
        for engine in self._engines:
            for id in engine.ids:
                try:
                    self._clients[engine, id] = await engine.connect(id)
                except ResourceError as error:
                    say(id, f"not there yet: {error}")
                    failed.append(error)
                except BienError:
                    raise
                except Exception as error:
                    log.exception("worker %s cannot be joined", id)
                    said = ResourceError(f"worker {id} cannot be joined: {type(error).__name__}: {error}")
                    say(id, f"not there yet: {said}")
                    failed.append(said)
        if failed and not self._clients:
            raise failed[0]
        return list(self._clients.values())

    def watch(self, gateway: Joins) -> None:
        """From now on, until `close`: those that come, or come back, join."""
        for engine in self._engines:
            for id in engine.ids:
                task = asyncio.get_running_loop().create_task(self._watch(gateway, engine, id))
                self._tasks.append(task)

    @property
    def alarms(self) -> dict[str, dict[str, str]]:
        return {id: found for engine in self._engines for id, found in engine.alarms.items()}

    @property
    def sizes(self) -> list[int]:
        """Workers of each engine, there or not."""
        return [len(engine.ids) for engine in self._engines]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        for engine in self._engines:
            await engine.close()

    async def _watch(self, gateway: Joins, engine: Engine, id: str) -> None:
        pause, said = BACKOFF, ""
        since = self._clock.time()
        while True:
            client = self._clients.get((engine, id))
            if client is not None and client.alive:
                if self._clock.time() - since >= LIVED:
                    pause, said = BACKOFF, ""
                await self._clock.sleep(CHECK)
                continue
            try:
                if client is not None:
                    del self._clients[engine, id]
                    await client.close()
                    if self._clock.time() - since < LIVED:  # it would not live longer
                        await self._clock.sleep(pause)
                        pause = min(2 * pause, LONGEST)
                await self._join(gateway, engine, id)
                since = self._clock.time()
                log.warning("worker %s joined", id)
            except Exception as error:  # whatever it is: nobody else would try again
                if str(error) != said:
                    said = str(error)
                    known = isinstance(error, BienError)
                    log.warning(
                        "worker %s cannot be joined: %s", id, error, exc_info=None if known else error
                    )
                await self._clock.sleep(pause)
                pause = min(2 * pause, LONGEST)

    async def _join(self, gateway: Joins, engine: Engine, id: str) -> None:
        client = await engine.connect(id)
        try:
            gateway.join(client)
        except BaseException:
            await client.close()
            raise
        self._clients[engine, id] = client
