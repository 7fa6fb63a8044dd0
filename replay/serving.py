"""Runs a deployment in this process until a signal: what `bien serve` does."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bien.core.clock import WallClock
from bien.core.deployment import Deployment
from bien.replay.display import Display
from bien.replay.report.words import counted
from bien.replay.run import new_loop
from bien.replay.stack import Stack

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_server(deployment: Deployment, attach: bool = False) -> int:
    """0 after SIGINT or SIGTERM: answers under way get `gateway.drain_seconds` to end; a second signal ends
    them at once. Raises what `Stack.start` raises; nothing is left running."""
    with keep_signals() as runner:
        return runner.run(_serve(deployment, attach))


@contextmanager
def keep_signals() -> Iterator[asyncio.Runner]:
    """A loop that may handle `SIGNALS`; who handled them before does so again afterwards."""
    before = {name: signal.getsignal(name) for name in SIGNALS}
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            yield runner
    finally:  # a loop that closes leaves handlers of its own behind
        for name, handler in before.items():
            signal.signal(name, handler)


async def _serve(deployment: Deployment, attach: bool) -> int:
    loop = asyncio.get_running_loop()
    signals = asyncio.Semaphore(0)
    for name in SIGNALS:
        loop.add_signal_handler(name, signals.release)
    with Display(WallClock()) as display:
        starting = asyncio.create_task(Stack.start(deployment, display.step, attach=attach, canary=True))
        stopping = asyncio.create_task(signals.acquire())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        stack = starting.result()
    workers = counted(len(stack.workers), "worker")
    print(f"serving {stack.model_name} at {stack.url}/v1 with {workers}", flush=True)
    try:
        await stopping
        await _drain(stack, deployment.gateway.drain_seconds, signals)
        print("stopping", file=sys.stderr, flush=True)
    finally:
        await stack.close()
    return 0


async def _drain(stack: Stack, seconds: float, signals: asyncio.Semaphore) -> None:
    if stack.gateway.inflight and seconds:
        text = f"draining: requests under way: {stack.gateway.inflight}, {seconds:g} s to end"
        print(f"{text}; a second signal ends them now", file=sys.stderr, flush=True)
    draining = asyncio.create_task(stack.drain(seconds))
    again = asyncio.create_task(signals.acquire())
    await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    await asyncio.gather(draining, again, return_exceptions=True)
