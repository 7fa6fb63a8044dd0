"""Where a stack's workers come from: started by it, or found by the leases of those that others started."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bien.core.clock import WallClock
from bien.core.compose import Composition
from bien.core.deployment import ModelSpec
from bien.core.errors import DeploymentError
from bien.core.kv.hashing import tenant_key
from bien.core.providers import Context
from bien.core.worker.client import WorkerClient
from bien.core.worker.launch import launch
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.published import Lease, join_token
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.start import WorkerStart, assign
from bien.gateway.core import Gateway
from bien.gateway.finder import Finder
from bien.gateway.index import DurableIndex
from bien.gateway.remote.fleet import RemoteFleet
from bien.replay.processes import OnStep, Processes, connect

FIND_SECONDS = 60.0  # until there must be a first worker
Watch = Callable[[Gateway], None]  # from then on, workers that come are the gateway's


async def start_workers(
    composition: Composition, model: ModelSpec, index: Any, on_step: OnStep, opened: AsyncExitStack
) -> tuple[list[WorkerClient], Watch]:
    """Those of the deployment, which `opened` stops; one that dies is started again."""
    starts = assign(composition, model)
    if not starts:
        return [], lambda gateway: None
    if isinstance(index, DurableIndex):
        starts = [msgspec.structs.replace(start, publication=index.publication) for start in starts]
    silence = composition.spec.silence_seconds
    processes = Processes(
        await launch(starts, lambda who, what: on_step(who, what, 0, 0)), partial(connect, silence=silence)
    )
    opened.push_async_callback(processes.stop)
    return await processes.connect(), lambda gateway: processes.watch(gateway, on_step)


async def join_engines(
    composition: Composition, registry: Any, on_step: OnStep, opened: AsyncExitStack
) -> tuple[list[WorkerClient], RemoteFleet]:
    """The workers that are others' servers. They go on without us; one that comes back joins again."""
    model, key = composition.model, tenant_key("", composition.spec.secret.encode())
    engines = []
    for name, part in composition.remote:
        ctx = Context(
            clock=WallClock(),
            metrics=registry,
            pool=name,
            model=Path(model.name).name,
            block_tokens=model.block_tokens,
            hash_key=key,
        )
        engines.append(part.make(ctx))
    fleet = RemoteFleet(engines, WallClock())
    opened.push_async_callback(fleet.close)
    return await fleet.connect(lambda who, what: on_step(who, what, 0, 0)), fleet


async def find_workers(
    composition: Composition, model: ModelSpec, index: Any, on_step: OnStep, opened: AsyncExitStack
) -> tuple[list[WorkerClient], Watch]:
    """Those that publish for a deployment of the same model, wherever they run; they go on without us.
    DeploymentError: this deployment cannot find any. ResourceError: there are none."""
    token, silence = shared_token(composition, index), composition.spec.silence_seconds
    name = Path(model.name).name

    async def reach(lease: Lease) -> WorkerClient:
        return await SocketClient.connect(lease.host, lease.port, token, silence=silence)

    def wanted(info: WorkerInfo) -> bool:
        return Path(info.model).name == name and info.block_tokens == model.block_tokens

    finder = Finder(index, reach, WallClock(), wanted)
    on_step("gateway", "looking for workers", 0, 0)
    clients = await finder.first(FIND_SECONDS)
    opened.push_async_callback(finder.close)
    return clients, finder.watch


def lasting_starts(composition: Composition, model: ModelSpec, index: Any, host: str) -> list[WorkerStart]:
    """Start messages of workers that gateways find by themselves. DeploymentError: as `find_workers`."""
    token = shared_token(composition, index)
    return [
        msgspec.structs.replace(start, token=token, publication=index.publication, host=host)
        for start in assign(composition, model)
    ]


def shared_token(composition: Composition, index: Any) -> str:
    """What workers and gateways of one deployment know without a word. DeploymentError when there is nothing
    to derive it from, or no index to meet by."""
    if not isinstance(index, DurableIndex):
        name = composition.gateway["kv_index"].provider.name
        raise DeploymentError(
            f"workers and gateways that are started apart meet in Redis, and the index is {name!r}; "
            "give --redis URL",
            field="gateway.kv_index",
        )
    if not composition.spec.secret:
        raise DeploymentError(
            "gateway.secret is empty: workers and gateways that are started apart know each other by it; "
            "set the same one on both sides",
            field="gateway.secret",
        )
    return join_token(composition.spec.secret, index.publication.namespace)
