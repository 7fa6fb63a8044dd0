"""Runs a deployment in this process until a signal: what `bien serve` does."""

from __future__ import annotations

import asyncio
import signal
import sys

from bien.core.clock import WallClock
from bien.core.deployment import Deployment
from bien.replay.display import Display
from bien.replay.run import new_loop
from bien.replay.stack import Stack


def run_server(deployment: Deployment) -> int:
    """0 after SIGINT or SIGTERM. Raises what `Stack.start` raises; nothing is left running."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_serve(deployment))


async def _serve(deployment: Deployment) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    with Display(WallClock()) as display:
        starting = asyncio.create_task(Stack.start(deployment, display.step))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        stack = starting.result()
    print(f"serving {stack.model_name} at {stack.url}/v1 with {len(stack.workers)} workers", flush=True)
    try:
        await stopping
        print("stopping", file=sys.stderr, flush=True)
    finally:
        await stack.close()
    return 0
