"""A worker process: builds an engine from the start message on stdin and serves it until told to stop.

Stdout carries what start.py describes and nothing else; whatever prints goes to stderr. The process
never outlives its parent: the end of stdin stops it, cleanly if that takes less than `GRACE`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bien.core.child_log import log_to_parent
from bien.core.clock import WallClock
from bien.core.errors import BienError, PluginError, ResourceError
from bien.core.worker.loop import EngineThread
from bien.core.worker.server import PUBLISHER, Server
from bien.core.worker.start import Failed, Progress, Ready, WorkerStart, line
from bien.core.worker.step_log import StepLog

if TYPE_CHECKING:
    from bien.core.build import BuiltWorker

GRACE = 1.0  # seconds for a clean stop once the parent is gone
SWITCH = 0.0005  # seconds that the engine thread may keep the I/O thread waiting for the interpreter lock
PR_SET_PDEATHSIG = 1
log = logging.getLogger("bien.worker")


def main() -> int:
    """Exit code: 0 after a clean stop, a BienError's own when the start failed, 1 when the engine broke."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who then stops us
    up = _Up()
    log_to_parent()
    watch = _ParentWatch()
    start = msgspec.json.decode(watch.first_line(), type=WorkerStart)
    if start.die_with_parent:
        _die_with_parent()
    watch.start()
    try:
        return _run(start, up, watch)
    except BienError as error:
        up.send(Failed.of(error))
        return error.exit_code
    except MemoryError as error:
        up.send(Failed.of(ResourceError(f"worker {start.id!r}: not enough memory to start: {error}")))
        return ResourceError.exit_code
    except Exception as error:
        log.exception("worker %r failed", start.id)
        up.send(Failed(BienError.code, f"worker {start.id!r} failed: {type(error).__name__}: {error}"))
        return 1


def _run(start: WorkerStart, up: _Up, watch: _ParentWatch) -> int:
    build = _builder(start.builder)
    # In a thread of its own, which ends: the threads that loading starts beside it (OpenMP's) end with it. If
    # they stayed, there would be more of them than cores, and those of the engine would not wait for each
    # other but sleep at once, which costs a small step most of its time.
    with ThreadPoolExecutor(1, "bien-build") as builder:
        built = builder.submit(build, start, lambda text: up.send(Progress(text))).result()
    return serve(start, built, up.send, watch.on_loss)


def serve(
    start: WorkerStart,
    built: BuiltWorker,
    announce: Callable[[Ready], None],
    on_loss: Callable[[Callable[[str], None]], None] = lambda stop: None,
) -> int:
    """Serve gateways until SIGTERM, until one of them asks for the end or the engine breaks; the exit code.
    `announce` hears where; `on_loss` is given what stops it."""
    # What was made until here stays: full collections need not walk through it.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(_serve(start, built, announce, on_loss))


async def _serve(
    start: WorkerStart,
    built: BuiltWorker,
    announce: Callable[[Ready], None],
    on_loss: Callable[[Callable[[str], None]], None],
) -> int:
    server = Server(built.info, start.token)
    for rank, one in zip(server.ranks, (built, *built.others), strict=True):
        steps = _step_log(start, rank.number)
        rank.engine = EngineThread(one.engine, one.executor, rank, depth=one.depth, steps=steps)
    host, port = await server.listen(start.host, start.port)
    if start.publication is not None:
        from bien.core.worker.publisher import Publisher

        def ask(dp_rank: int) -> None:
            server.ranks[dp_rank].engine.snapshot(PUBLISHER)

        server.publisher = Publisher(start.publication, built.info, host, port, ask)
        server.publisher.start()
    for rank in server.ranks:
        rank.engine.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop, "SIGTERM")
    on_loss(server.stop)
    announce(Ready(host, port, built.info))
    reason = await server.stopped
    ends = [server.close(reason)]
    if server.publisher is not None:
        ends.append(server.publisher.close())
    await asyncio.gather(*ends)
    for one in (built, *built.others):
        one.parts.close()
    return 0 if reason == "stopped" else 1


def _step_log(start: WorkerStart, dp_rank: int) -> StepLog | None:
    if not start.pool.step_log:
        return None
    name = start.id if start.pool.dp_ranks == 1 else f"{start.id}.{dp_rank}"
    return StepLog(Path(start.pool.step_log) / f"{name}.jsonl")


class _Up:
    """The real stdout, out of reach of prints."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)

    def send(self, message: Any) -> None:
        try:
            os.write(self._out, line(message))
        except BrokenPipeError:
            pass


class _ParentWatch:
    """Reads stdin. Raw reads: a thread inside `sys.stdin` could not be left behind at exit."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[str], None] | None = None

    def first_line(self) -> bytes:
        data = b""
        while not data.endswith(b"\n"):
            more = os.read(0, 65536)
            if not more:
                sys.exit("a worker is started by bien, with a start message on stdin")
            data += more
        return data

    def start(self) -> None:
        threading.Thread(target=self._watch, name="bien-parent-watch", daemon=True).start()

    def on_loss(self, stop: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop

    def _watch(self) -> None:
        while os.read(0, 4096):
            pass
        if self._loop is not None and self._stop is not None:
            try:
                self._loop.call_soon_threadsafe(self._stop, "the parent is gone")
            except RuntimeError:  # stopping already
                pass
        WallClock().block(GRACE)
        os._exit(1)


def _builder(name: str) -> Callable[[WorkerStart, Callable[[str], None]], BuiltWorker]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"worker builder {name!r} cannot be loaded: {error}") from error
    return found  # type: ignore[no-any-return]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
