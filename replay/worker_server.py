"""Runs a deployment's workers alone until a signal: what `bien worker` does. Gateways find them by lease."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from bien.core.clock import WallClock
from bien.core.compose import compose
from bien.core.deployment import Deployment
from bien.core.errors import UserError
from bien.core.plugins import PluginManager
from bien.core.worker.launch import WorkerProcess, launch
from bien.core.worker.redis_url import masked
from bien.core.worker.resources import check_resources
from bien.gateway.http.server import address, check_port
from bien.gateway.index import DurableIndex
from bien.replay.display import Display
from bien.replay.fleet import lasting_starts
from bien.replay.processes import WARNING, OnStep, Processes
from bien.replay.redis_option import refuse_embedded
from bien.replay.serving import SIGNALS, keep_signals
from bien.replay.stack import open_index, resolve

EVERYWHERE = ("", "0.0.0.0", "::", "*")  # addresses to listen at, and none to connect to


def run_workers(deployment: Deployment, host: str) -> int:
    """0 after SIGINT or SIGTERM. `host`: the address where they listen, which is what gateways are told.
    Raises BienError when they cannot start; nothing is left running."""
    if host in EVERYWHERE:
        raise UserError(f"--host is {host!r}; valid: one address of this machine, which gateways can reach")
    with keep_signals() as runner:
        return runner.run(_serve(deployment, host))


async def _serve(deployment: Deployment, host: str) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for name in SIGNALS:
        loop.add_signal_handler(name, task.cancel)
    try:
        async with AsyncExitStack() as opened:
            with Display(WallClock()) as display:
                told = await _start(deployment, host, display.step, opened)
            print(told, flush=True)
            await loop.create_future()
    except asyncio.CancelledError:
        print("stopping", file=sys.stderr, flush=True)
    return 0


async def _start(deployment: Deployment, host: str, on_step: OnStep, opened: AsyncExitStack) -> str:
    composition = compose(deployment, PluginManager.load())
    refuse_embedded(composition)
    await check_port(host, 0)  # not after all is loaded
    async with AsyncExitStack() as asking:
        index = await open_index(composition, None, asking)
        folder = await resolve(deployment.model.name, on_step)
        model = msgspec.structs.replace(composition.model, name=str(folder))
        starts = lasting_starts(composition, model, index, host)
    assert isinstance(index, DurableIndex)
    for warning in check_resources(composition, model):
        on_step(WARNING, warning, 0, 0)
    workers = await launch(starts, lambda who, what: on_step(who, what, 0, 0))
    processes = Processes(workers, _unconnected)
    opened.push_async_callback(processes.stop)
    processes.watch(_Nobody(), on_step)
    names = ", ".join(f"{w.start.id} at {address(w.ready.host, w.ready.port)}" for w in workers)
    return f"workers {names}; their leases are in {masked(index.publication.url)}"


async def _unconnected(worker: WorkerProcess) -> Any:
    return None  # gateways connect by themselves


class _Nobody:
    def join(self, client: Any) -> None:
        pass
