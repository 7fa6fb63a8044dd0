"""`python -m bien.core.worker.rank`: a rank other than 0, as rank 0 starts it (rank_launch.py).

It ends with its links: neither a rank 0 that is killed nor one that forgets it leaves it running, or the
folder in which they meet lying about.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bien.core.child_log import log_to_parent
from bien.core.clock import WallClock
from bien.core.compose import compose_pool
from bien.core.errors import BienError
from bien.core.executors.link import Link, LinkClosed
from bien.core.executors.rank_messages import BlocksDown, Done, Down, Fault, Here
from bien.core.parallel.communicator import Communicator
from bien.core.worker.rank_launch import RankStart, meet
from bien.core.worker.start import Failed

if TYPE_CHECKING:
    from bien.core.executors.rank import RankLoop

GRACE = 1.0  # seconds for a clean end once rank 0 is gone
log = logging.getLogger("bien.worker")


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    log_to_parent()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
    steps: Link[Down] = Link(socket.socket(fileno=start.steps), Down)
    blocks: Link[BlocksDown] = Link(socket.socket(fileno=start.blocks), BlocksDown)
    on_loss = partial(shutil.rmtree, Path(start.store).parent, ignore_errors=True)
    try:
        steps.send(Here(start.rank, "steps", "", os.getpid()))
    except LinkClosed:
        on_loss()
        return 1
    find = partial(meet, start.store, start.rank, start.world)
    return serve_rank(start, steps, blocks, find, on_loss)


def serve_rank(
    start: RankStart,
    steps: Link[Down],
    blocks: Link[BlocksDown],
    meet: Callable[[str], Communicator],
    on_loss: Callable[[], None] = lambda: None,
) -> int:
    """Load this rank's part and run what rank 0 sends; the exit code. `meet` joins the ranks of a device;
    `on_loss` is called, once or twice, when rank 0 is gone."""
    try:
        _serve(start, steps, blocks, meet, on_loss)
        return 0
    except LinkClosed:
        on_loss()
        return 1
    except BienError as error:
        failed, code = Failed.of(error), error.exit_code
    except Exception as error:
        log.exception("rank %d failed", start.rank)
        failed, code = Failed(BienError.code, f"{type(error).__name__}: {error}"), 1
    try:
        steps.send(Fault(failed))
    except LinkClosed:
        pass
    return code


def _serve(
    start: RankStart,
    steps: Link[Down],
    blocks: Link[BlocksDown],
    meet: Callable[[str], Communicator],
    on_loss: Callable[[], None],
) -> None:
    from bien.core.architectures.registry import read_architecture
    from bien.core.build import prepare
    from bien.core.executors.make import load_executor, rank_device
    from bien.core.executors.rank import RankLoop

    model = start.model
    architecture = read_architecture(model.name, model.block_tokens, model.dtype, model.max_context)
    pool = compose_pool(model, start.pool, start.plugins)
    loop = RankLoop()
    threading.Thread(target=_follow, args=(loop, blocks, on_loss), daemon=True).start()
    ctx, parts = prepare(pool, architecture, threads=start.threads)
    ctx.device = rank_device(ctx.device, start.local_rank)
    steps.send(Done())
    steps.receive()  # Join
    communicator = meet(ctx.device)
    try:
        executor = loop.executor = load_executor(ctx, communicator)
        heads = parts["parallel"].kv_shard(architecture.kv_heads)
        steps.send(Done(heads.start, heads.stop))
        gc.collect()
        gc.freeze()  # as rank 0 does: full collections need not walk through what was made until here
        loop.run(steps)
        executor.close()
    finally:
        communicator.close()
    parts.close()


def _follow(loop: RankLoop, blocks: Link[BlocksDown], on_loss: Callable[[], None]) -> None:
    loop.serve_blocks(blocks)
    on_loss()
    WallClock().block(GRACE)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
