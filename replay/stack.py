"""`Stack`: a deployment up and serving: worker processes, and a gateway with its port in this process."""

from __future__ import annotations

import asyncio
import random
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
from bien.core.worker.client import WorkerClient
from bien.core.worker.launch import launch
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.resources import check_resources
from bien.core.worker.start import assign
from bien.core.worker.threads import in_thread
from bien.gateway.core import Gateway
from bien.gateway.http.app import make_app
from bien.gateway.http.server import Server, check_port, serve
from bien.replay.processes import WARNING, OnStep, Processes

CLEAN_SECONDS = 5.0  # that a cancelled download or conversion gets to end; less than a parent waits for us


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
            model = msgspec.structs.replace(composition.model, name=str(folder))
            for warning in check_resources(composition, model):
                on_step(WARNING, warning, 0, 0)
            starts = assign(composition, model)
            processes = Processes(await launch(starts, lambda who, what: on_step(who, what, 0, 0)))
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


async def _resolve(name: str, on_step: OnStep) -> Path:
    """The model's folder. It may take a download, in a thread, which only its own progress can end: who is
    cancelled waits until it has, and has removed what it wrote."""
    wanted = True

    def progress(what: str, done: int, total: int) -> None:
        if not wanted:
            raise BienError("nobody waits for the model any more")
        on_step("model", what, done, total)

    fetching = asyncio.ensure_future(in_thread(resolve_model, name, progress))
    try:
        return await asyncio.shield(fetching)
    except asyncio.CancelledError:
        wanted = False
        await asyncio.wait([fetching], timeout=CLEAN_SECONDS)
        fetching.add_done_callback(lambda f: f.cancelled() or f.exception())  # nobody else asks for it
        raise


def _gateway(composition: Composition, clients: list[WorkerClient]) -> tuple[Gateway, CollectorRegistry]:
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
