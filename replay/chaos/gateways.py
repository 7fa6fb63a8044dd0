"""Our own gateways, as processes: before stand-in engines, or before real workers that meet them in Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, RemoteSpec, Selection
from bien.core.plugins import PluginManager
from bien.core.worker.launch import WorkerProcess, launch
from bien.core.worker.redis_link import ask, close_redis, redis_client
from bien.replay.chaos.engine import CONTEXT, ChaosEngine
from bien.replay.fleet import lasting_starts
from bien.replay.redis_server import RedisServer
from bien.replay.stack import open_index
from bien.replay.stack_process import StackProcess

BLOCK = 16
WORKERS = 3
LEASE = 1.5  # seconds
GRACE = 1.0  # seconds until what is wrong with events is an alarm
FLEET_TOKENS = 400_000  # of one worker's KV


class Running(Protocol):
    """A gateway that serves."""

    url: str
    pid: int

    async def stop(self) -> None: ...


Start = Callable[[Deployment, bool, bool], Awaitable[Running]]  # attach to workers that run; probe at once


class _Process:
    def __init__(self, stack: StackProcess) -> None:
        self.url, self.pid = stack.up.url, stack.pid
        self._stack = stack

    async def stop(self) -> None:
        await self._stack.stop()


async def start_process(deployment: Deployment, attach: bool, canary: bool) -> Running:
    return _Process(await StackProcess.start(deployment, attach=attach, canary=canary))


def before_engines(
    model: Path, engines: list[ChaosEngine], gateway: dict[str, Any], *, replay: bool, **parameters: Any
) -> Deployment:
    """A deployment whose workers they are; `gateway`: fields of its section."""
    named: dict[str, Any] = {
        "urls": [engine.url for engine in engines],
        "events": [engine.addresses[0] for engine in engines],
        "poll_seconds": 0.1,
        "grace_seconds": GRACE,
    }
    if replay:
        named["replay"] = [engine.addresses[1] for engine in engines]
    pool = RemoteSpec(Selection("vllm", named | parameters), "e")
    spec = _gateway(gateway)
    return Deployment(
        ModelSpec(str(model), block_tokens=BLOCK, max_context=CONTEXT), spec, (), remote=(pool,)
    )


def _gateway(fields: dict[str, Any]) -> GatewaySpec:
    given: dict[str, Any] = {"port": 0, "secret": "chaos"} | fields
    return GatewaySpec(**given)


class Fleet:
    """A Redis, and real workers that live on while gateways come and go. Made by `start`."""

    def __init__(self, deployment: Deployment, server: RedisServer) -> None:
        self.deployment = deployment
        self.server = server
        self.workers: list[WorkerProcess] = []
        self.redis = redis_client(server.url, 2.0)

    @classmethod
    async def start(cls, model: Path, gateway: dict[str, Any], index: dict[str, Any]) -> Fleet:
        """ResourceError: there is no redis-server."""
        server = await RedisServer.start()
        parameters = {"url": server.url, "lease_seconds": LEASE, "poll_seconds": 0.02, "flush_seconds": 0.005}
        spec = _gateway({"kv_index": Selection("redis", parameters | index)} | gateway)
        costs = {"step_ms": 2.0, "token_ms": 0.1}
        pool = PoolSpec(
            name="w",
            count=WORKERS,
            kv_tokens=FLEET_TOKENS,
            slots=16,
            threads=1,
            executor=Selection("simulated", costs),
        )
        of = ModelSpec(str(model), block_tokens=BLOCK, max_context=CONTEXT)
        fleet = cls(Deployment(of, spec, (pool,)), server)
        try:
            composition = compose(fleet.deployment, PluginManager.load())
            async with AsyncExitStack() as opened:
                found = await open_index(composition, None, opened)
                starts = lasting_starts(composition, composition.model, found, "127.0.0.1")
            fleet.workers = await launch(starts)
        except BaseException:
            await fleet.stop()
            raise
        return fleet

    def named(self, worker: str) -> int:
        """Its place among the workers."""
        return next(i for i, process in enumerate(self.workers) if process.ready.info.id == worker)

    async def kill(self, at: int) -> None:
        """As the kernel would, without a word."""
        os.kill(self.workers[at].pid, signal.SIGKILL)
        await self.workers[at].wait()

    async def revive(self, at: int) -> None:
        self.workers[at] = await self.workers[at].respawn()

    async def keys(self) -> dict[str, float]:
        """All keys of the Redis, with the seconds that each still lives (-1: for ever)."""
        names = [name.decode() for name in await ask(self.redis.keys("*"))]
        return {name: await ask(self.redis.pttl(name)) / 1000 for name in sorted(names)}

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers), return_exceptions=True)
        await close_redis(self.redis)
        await self.server.stop()


def changed(deployment: Deployment, **gateway: Any) -> Deployment:
    """With other fields of its gateway."""
    return msgspec.structs.replace(deployment, gateway=msgspec.structs.replace(deployment.gateway, **gateway))
