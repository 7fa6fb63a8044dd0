"""What the restart protocol runs on: a Redis, worker processes, and gateways that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bien.core.clock import WallClock
from bien.core.compose import Composition, compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.worker.launch import WorkerProcess, launch
from bien.core.worker.socket_client import SocketClient
from bien.gateway.core import Gateway
from bien.gateway.index import DurableIndex
from bien.replay.fleet import find_workers, lasting_starts, shared_token
from bien.replay.stack import open_index

BLOCK = 16
WARM_SECONDS = 10.0


def deployment(
    model: Path,
    url: str,
    workers: int,
    kv_tokens: int,
    lease: float,
    index: dict[str, Any] | None = None,
    **executor: float,
) -> Deployment:
    """Workers with real engines, whose executors only wait; `lease` in seconds; `index`: more of its own."""
    parameters = {"url": url, "lease_seconds": lease, "on_failure": "mirror", **(index or {})}
    gateway = GatewaySpec(secret="restart", kv_index=Selection("redis", parameters))
    pool = PoolSpec(
        count=workers,
        kv_tokens=kv_tokens,
        slots=16,
        threads=1,
        executor=Selection("simulated", dict(executor)),
    )
    return Deployment(ModelSpec(str(model), block_tokens=BLOCK), gateway, (pool,))


class Site:
    """One gateway with an index of its own, as of a process of its own."""

    def __init__(self, gateway: Gateway, index: Any, opened: AsyncExitStack) -> None:
        self.gateway = gateway
        self.index = index
        self.serving = True  # a balancer sends requests there
        self._opened = opened

    @classmethod
    async def open(cls, composition: Composition) -> Site:
        """It finds the workers by their leases, and takes requests once it knows what they hold."""
        async with AsyncExitStack() as opened:
            index = await open_index(composition, None, opened)
            clients, watch = await find_workers(
                composition, composition.model, index, lambda *_: None, opened
            )
            router = composition.gateway["router"].make(Context(clock=WallClock()))
            gateway = Gateway(clients, router, index, WallClock(), composition.spec)
            opened.push_async_callback(gateway.close)
            await gateway.warm(WARM_SECONDS)
            watch(gateway)
            return cls(gateway, index, opened.pop_all())

    async def close(self) -> None:
        """After what is under way: a rolling restart takes it from the balancer first."""
        self.serving = False
        await self.gateway.drain()
        await self._opened.aclose()


class Fleet:
    """Made by `open`; `close` ends all of it."""

    def __init__(self, composition: Composition, processes: list[WorkerProcess], sites: list[Site]) -> None:
        self.composition = composition
        self.processes = processes
        self.sites = sites

    @classmethod
    async def open(cls, of: Deployment, gateways: int) -> Fleet:
        composition = compose(of, PluginManager.load())
        async with AsyncExitStack() as opened:
            index = await open_index(composition, None, opened)
            starts = lasting_starts(composition, composition.model, index, "127.0.0.1")
        fleet = cls(composition, await launch(starts), [])
        try:
            for _ in range(gateways):
                fleet.sites.append(await Site.open(composition))
            async with asyncio.timeout(WARM_SECONDS):
                while any(len(site.gateway.infos) < len(starts) for site in fleet.sites):
                    await WallClock().sleep(0.05)
        except BaseException:
            await fleet.close()
            raise
        return fleet

    async def replace(self, number: int) -> None:
        """One gateway drains and ends; another takes its place, and knows nothing but what is stored."""
        await self.sites[number].close()
        self.sites[number] = await Site.open(self.composition)

    async def kill_worker(self, number: int) -> None:
        """It is started again, with an empty cache, and found by all gateways."""
        old = self.processes[number]
        os.kill(old.pid, signal.SIGKILL)
        await old.wait()
        self.processes[number] = await old.respawn()

    async def client(self, number: int) -> SocketClient:
        """A connection of an onlooker to a worker that runs now."""
        any_index = self.sites[0].index
        assert isinstance(any_index, DurableIndex)
        ready = self.processes[number].ready
        return await SocketClient.connect(ready.host, ready.port, shared_token(self.composition, any_index))

    async def close(self) -> None:
        for site in self.sites:
            await site.close()
        await asyncio.gather(*(process.stop() for process in self.processes))
