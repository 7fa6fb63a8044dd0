"""`Stack`: a deployment up and serving: worker processes, and a gateway with its port in this process."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from bien.core.clock import WallClock
from bien.core.compose import Composition, compose, select
from bien.core.deployment import Deployment, Selection
from bien.core.errors import BienError
from bien.core.models.fetch import resolve_model
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.text.model import TextModel
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.resources import check_resources
from bien.core.worker.threads import in_thread
from bien.gateway.core import Gateway
from bien.gateway.http.app import make_app
from bien.gateway.http.server import Server, check_port, serve
from bien.gateway.index import DurableIndex, KVIndex
from bien.gateway.parsing.dialects import dialect_of
from bien.gateway.parsing.parser import Parser
from bien.gateway.remote.fleet import RemoteFleet
from bien.gateway.verify.options import VerifyOptions
from bien.replay.fleet import find_workers, join_engines, start_workers
from bien.replay.processes import WARNING, OnStep
from bien.replay.redis_option import refuse_embedded, with_server

CLEAN_SECONDS = 5.0  # that a cancelled download or conversion gets to end; less than a parent waits for us
GREET_SECONDS = 5.0  # that canaries get, before requests are taken
WARM_SECONDS = 10.0  # that the index gets to learn what running workers hold, before requests are taken


class Stack:
    """Made by `start`; `close` stops everything that it started, whatever state it is in."""

    def __init__(
        self,
        composition: Composition,
        gateway: Gateway,
        server: Server,
        name: str,
        engines: RemoteFleet | None = None,
    ) -> None:
        self.composition = composition
        self.gateway = gateway
        self.server = server
        self.model_name = name
        self._engines = engines
        self._open = AsyncExitStack()

    @classmethod
    async def start(
        cls,
        deployment: Deployment,
        on_step: OnStep = lambda *_: None,
        *,
        attach: bool = False,
        canary: bool = False,
    ) -> Stack:
        """Compose, fetch the model, start workers (`attach`: find those that run), connect, listen. With
        `canary` each worker is probed when it joins, unless the deployment wants no probes: before what is
        measured, no step is that of anybody else.

        Raises what any of these raises (BienError); nothing is left running then, nor when cancelled.
        """
        manager = PluginManager.load()
        composition = compose(deployment, manager)
        if attach:
            refuse_embedded(composition)
        await check_port(deployment.gateway.host, deployment.gateway.port)  # not after all is loaded
        folder = await resolve(deployment.model.name, on_step)
        async with AsyncExitStack() as opened:
            composition = await with_server(composition, opened)
            registry = CollectorRegistry()
            index = await open_index(composition, registry, opened)
            # Workers get the folder: none of them needs to look for the model again.
            model = msgspec.structs.replace(composition.model, name=str(folder))
            for warning in () if attach or not composition.pools else check_resources(composition, model):
                on_step(WARNING, warning, 0, 0)
            fleet = find_workers if attach else start_workers
            clients, watch = await fleet(composition, model, index, on_step, opened)
            remote, engines = await join_engines(composition, registry, on_step, opened)
            clients += remote
            gateway = _gateway(composition, clients, index, registry, canary)
            opened.push_async_callback(gateway.close)
            await gateway.warm(WARM_SECONDS)
            if gateway.verifier is not None:
                await gateway.verifier.greeted(GREET_SECONDS)
            text = await in_thread(TextModel.load, folder)
            parser = _parser(composition, manager, text)
            opened.callback(parser.close)
            name = Path(deployment.model.name).name
            app = make_app(
                gateway,
                text,
                name,
                max_context=gateway.max_context,
                vocab_size=max(client.info.vocab_size for client in clients),
                refuses={field for client in clients for field in client.info.refuses},
                registry=registry,
                health=lambda: _health(composition, index, engines, gateway),
                parser=parser,
                volatile_lines=deployment.gateway.volatile_lines,
            )
            server = await serve(app, deployment.gateway.host, deployment.gateway.port)
            opened.push_async_callback(server.close)
            watch(gateway)
            engines.watch(gateway)
            stack = cls(composition, gateway, server, name, engines)
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
        """Of the deployment; of others' servers as many as their pools say."""
        own = sum(p.spec.engines * p.spec.devices for p in self.composition.pools)
        sizes = self._engines.sizes if self._engines is not None else ()
        remote = zip(self.composition.deployment.remote, sizes, strict=True)
        return own + sum(spec.devices * workers for spec, workers in remote)

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


async def resolve(name: str, on_step: OnStep) -> Path:
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


async def open_index(
    composition: Composition, registry: CollectorRegistry | None, opened: AsyncExitStack
) -> KVIndex:
    """The deployment's index, its store reached. ResourceError: it cannot be."""
    ctx = Context(clock=WallClock(), rng=random.Random(), metrics=registry)
    # In a thread: the first one on a machine may compile for seconds.
    index: KVIndex = await in_thread(composition.gateway["kv_index"].make, ctx)
    if isinstance(index, DurableIndex):
        await index.start()
        opened.push_async_callback(index.stop)
    return index


def _gateway(
    composition: Composition,
    clients: list[WorkerClient],
    index: KVIndex,
    registry: CollectorRegistry,
    canary: bool,
) -> Gateway:
    clock = WallClock()
    router = composition.gateway["router"].make(Context(clock=clock, rng=random.Random(), metrics=registry))
    way = composition.spec.verify
    verify = None if way == "off" else VerifyOptions(canary=canary and way == "probe", probe=way == "probe")
    return Gateway(clients, router, index, clock, composition.spec, metrics=registry, verify=verify)


def _parser(composition: Composition, manager: PluginManager, text: TextModel) -> Parser:
    """The deployment's, or the one that speaks as the model's chat template does."""
    part = composition.gateway.get("parser")
    if part is None:
        part = select("parser", Selection(dialect_of(text.template)), manager, "gateway.parser")
    parser: Parser = part.make(Context())
    return parser


def _health(
    composition: Composition, index: KVIndex, engines: RemoteFleet, gateway: Gateway
) -> dict[str, Any]:
    found: dict[str, Any] = {"name": composition.gateway["kv_index"].provider.name}
    if isinstance(index, DurableIndex):
        found |= msgspec.to_builtins(index.health)
    alarms = engines.alarms
    routing = {"routing": gateway.parity} if gateway.parity else {}
    return {"index": found} | routing | ({"alarms": alarms} if alarms else {})
