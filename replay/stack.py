"""`Stack`: a deployment up and serving: worker processes, and a gateway with its port in this process."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from bien.core.clock import WallClock
from bien.core.compose import Composition, compose
from bien.core.deployment import Deployment
from bien.core.errors import BienError
from bien.core.models.fetch import resolve_model
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.text.model import TextModel
from bien.core.worker.launch import WorkerProcess, launch
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.start import assign
from bien.core.worker.threads import in_thread
from bien.gateway.core import Gateway
from bien.gateway.http.app import make_app
from bien.gateway.http.server import Server, check_port, serve

OnStep = Callable[[str, str, int, int], None]  # who, what, done, total (0: unknown)
RESTARTS = 5  # of one worker in a row; then the rest go on without it
GRACE = 0.75  # seconds that workers get to stop
BACKOFF = 1.0  # seconds, doubled each time
log = logging.getLogger("bien.stack")


class Stack:
    """Made by `start`; `close` stops everything that it started, whatever state it is in."""

    def __init__(self, composition: Composition, gateway: Gateway, server: Server, name: str) -> None:
        self.composition = composition
        self.gateway = gateway
        self.server = server
        self.model_name = name
        self._open = AsyncExitStack()

    @classmethod
    async def start(cls, deployment: Deployment, on_step: OnStep = lambda *_: None) -> Stack:
        """Compose, fetch the model, start workers, connect, listen.

        Raises what any of these raises (BienError); nothing is left running then, nor when cancelled.
        """
        composition = compose(deployment, PluginManager.load())
        await check_port(deployment.gateway.host, deployment.gateway.port)  # not after all is loaded
        folder = await _resolve(deployment.model.name, on_step)
        async with AsyncExitStack() as opened:
            # Workers get the folder: none of them needs to look for the model again.
            starts = assign(composition, msgspec.structs.replace(composition.model, name=str(folder)))
            processes = _Processes(await launch(starts, lambda who, what: on_step(who, what, 0, 0)))
            opened.push_async_callback(processes.stop)
            clients = await processes.connect()
            gateway, registry = _gateway(composition, clients)
            opened.push_async_callback(gateway.close)
            text = await in_thread(TextModel.load, folder)
            name = Path(deployment.model.name).name
            app = make_app(
                gateway,
                text,
                name,
                max_context=gateway.max_context,
                vocab_size=clients[0].info.vocab_size,
                registry=registry,
            )
            server = await serve(app, deployment.gateway.host, deployment.gateway.port)
            opened.push_async_callback(server.close)
            processes.watch(gateway, on_step)
            stack = cls(composition, gateway, server, name)
            stack._open = opened.pop_all()
        return stack

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def workers(self) -> list[WorkerInfo]:
        """Those alive now."""
        return self.gateway.infos

    @property
    def accelerators(self) -> int:
        return sum(p.spec.count * p.spec.devices for p in self.composition.pools)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests (503 with Retry-After, and so does /ready) and wait for those under way, at
        most so long. What is left then, `close` ends."""
        self.server.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.gateway.drain()

    async def close(self) -> None:
        """At once."""
        await self._open.aclose()


class _Processes:
    """The worker processes; one that dies is started again and joins the gateway with an empty cache."""

    def __init__(self, workers: list[WorkerProcess]) -> None:
        self._workers = workers
        self._watches: list[asyncio.Task[None]] = []
        self._clock = WallClock()

    async def connect(self) -> list[SocketClient]:
        return [await self._connect(worker) for worker in self._workers]

    async def _connect(self, worker: WorkerProcess) -> SocketClient:
        return await SocketClient.connect(worker.ready.host, worker.ready.port, worker.start.token)

    def watch(self, gateway: Gateway, on_step: OnStep) -> None:
        for index in range(len(self._workers)):
            self._watches.append(asyncio.create_task(self._watch(index, gateway, on_step)))

    async def _watch(self, index: int, gateway: Gateway, on_step: OnStep) -> None:
        failures = 0
        while failures < RESTARTS:
            worker = self._workers[index]
            reason = await worker.wait()
            log.warning("%s; starting it again", reason)
            on_step(worker.start.id, f"died: {reason}; starting it again", 0, 0)
            try:
                self._workers[index] = again = await worker.respawn()
                gateway.join(await self._connect(again))
                failures = 0
                on_step(worker.start.id, "is back", 0, 0)
            except BienError as error:
                failures += 1
                log.warning("worker %s cannot be started again: %s", worker.start.id, error)
                await self._clock.sleep(BACKOFF * 2**failures)
        on_step(self._workers[index].start.id, f"given up after {RESTARTS} attempts", 0, 0)

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(worker.stop(GRACE) for worker in self._workers))


async def _resolve(name: str, on_step: OnStep) -> Path:
    """The model's folder. It may take a download, in a thread, which only its own progress can end."""
    wanted = True

    def progress(what: str, done: int, total: int) -> None:
        if not wanted:
            raise BienError("nobody waits for the model any more")
        on_step("model", what, done, total)

    try:
        return await in_thread(resolve_model, name, progress)
    finally:
        wanted = False


def _gateway(composition: Composition, clients: list[SocketClient]) -> tuple[Gateway, CollectorRegistry]:
    registry = CollectorRegistry()
    clock = WallClock()
    ctx = Context(clock=clock, rng=random.Random(), metrics=registry)
    parts = composition.gateway
    gateway = Gateway(
        clients,
        parts["router"].make(ctx),
        parts["kv_index"].make(ctx),
        clock,
        composition.spec,
        metrics=registry,
    )
    return gateway, registry
