"""A `GroupExecutor` whose other ranks are threads of this process: fast, and nothing can be left running."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bien.core.architectures.registry import read_architecture
from bien.core.executors.group import GroupExecutor
from bien.core.executors.link import Link, LinkClosed
from bien.core.executors.make import executor_groups, load_executor
from bien.core.executors.rank import RankLoop
from bien.core.executors.rank_messages import BlocksDown, BlocksUp, Down, Fault, Up
from bien.core.executors.ranks import RemoteRank
from bien.core.providers import Context
from bien.core.testing.parallel import ThreadCommunicator
from bien.core.worker.start import Failed
from bien.plugins.parallel.tensor import TensorParallel


def thread_group(
    folder: Path,
    world: int,
    parts: Callable[[Context], dict[str, Any]],
    *,
    dtype: str = "float64",
    block_tokens: int = 8,
    max_context: int = 256,
) -> GroupExecutor:
    """`parts` makes a rank's quantizer and speculator. Weights are loaded one rank after the other."""
    architecture = read_architecture(folder, block_tokens, dtype, max_context)
    executors, strategies = [], []
    communicators = ThreadCommunicator.of(world)
    for communicator in communicators:
        ctx = Context(architecture=architecture, dtype=dtype)
        strategies.append(TensorParallel(architecture))
        ctx.parts = {**parts(ctx), "parallel": strategies[-1]}
        executors.append(load_executor(ctx, communicator))
    remotes = []
    for rank in range(1, world):
        ends = [socket.socketpair() for _ in range(2)]
        loop = RankLoop()
        loop.executor = executors[rank]
        steps: Link[Down] = Link(ends[0][1], Down)
        blocks: Link[BlocksDown] = Link(ends[1][1], BlocksDown)
        for work in (
            lambda x=loop, s=steps, c=communicators[rank]: run(x, s, c),
            lambda x=loop, b=blocks: x.serve_blocks(b),
        ):
            threading.Thread(target=work, daemon=True).start()
        up: Link[Up] = Link(ends[0][0], Up)
        remote = RemoteRank(rank, up, Link[BlocksUp](ends[1][0], BlocksUp))
        remote.heads = strategies[rank].kv_shard(architecture.kv_heads)
        remotes.append(remote)
    return GroupExecutor(
        executors[0],
        remotes,
        executor_groups(architecture, executors[0].drafter),
        strategies[0].kv_shard(architecture.kv_heads),
        architecture.kv_heads,
        communicators[0],
    )


def run(loop: RankLoop, steps: Link[Down], communicator: ThreadCommunicator) -> None:
    """As a rank's process does."""
    try:
        loop.run(steps)
    except LinkClosed:
        pass
    except Exception as error:
        failed = Failed(getattr(error, "code", "internal_error"), f"{type(error).__name__}: {error}")
        with suppress(LinkClosed):
            steps.send(Fault(failed))
    communicator.close()
    steps.close()
