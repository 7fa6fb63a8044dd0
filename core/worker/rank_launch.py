"""The ranks beyond 0 of a worker, as children of its process. No torch until they meet."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile

import msgspec

from bien.core.deployment import ModelSpec, PoolSpec
from bien.core.entry_points import PluginRef
from bien.core.errors import ResourceError
from bien.core.executors.link import Link
from bien.core.executors.rank_messages import BlocksUp, Up
from bien.core.executors.ranks import RemoteRank
from bien.core.parallel.communicator import Communicator
from bien.core.worker.launch import environment
from bien.core.worker.start import line

COLLECTIVE_SECONDS = (
    120.0  # that a rank waits for a peer in one exchange; one that has died is noticed at once
)
HOST = "127.0.0.1"


class RankStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank needs. Written by rank 0, sent over its stdin, never by argument."""

    rank: int
    local_rank: int  # among those of this machine
    world: int
    model: ModelSpec
    pool: PoolSpec
    plugins: tuple[PluginRef, ...]
    threads: int
    steps: int = -1  # file descriptors of its links
    blocks: int = -1
    store: str = ""  # the file in which all find each other


class LaunchedRanks:
    """See `Ranks`. Links are socket pairs and what ranks exchange stays on the loopback interface."""

    def __init__(self, model: ModelSpec, pool: PoolSpec, plugins: tuple[PluginRef, ...]) -> None:
        self._model, self._pool, self._plugins = model, pool, plugins
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, world: int, threads: int) -> list[RemoteRank]:
        self._folder = tempfile.TemporaryDirectory(prefix="bien-ranks-")
        remotes: list[RemoteRank] = []
        try:
            for rank in range(1, world):
                remotes.append(self._spawn(rank, world, threads))
            for remote in remotes:
                remote.answer()
        except BaseException:
            for remote in remotes:
                remote.kill()
            raise
        return remotes

    def communicator(self, rank: int, world: int, device: str) -> Communicator:
        return meet(self._store, rank, world, device)

    def met(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _store(self) -> str:
        assert self._folder is not None
        return f"{self._folder.name}/store"

    def _spawn(self, rank: int, world: int, threads: int) -> RemoteRank:
        steps, its_steps = socket.socketpair()
        blocks, its_blocks = socket.socketpair()
        start = RankStart(
            rank,
            rank,
            world,
            self._model,
            self._pool,
            self._plugins,
            threads,
            its_steps.fileno(),
            its_blocks.fileno(),
            self._store,
        )
        with its_steps, its_blocks:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "bien.core.worker.rank"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment(threads),
                    pass_fds=(its_steps.fileno(), its_blocks.fileno()),
                    start_new_session=True,  # a Ctrl-C at the terminal is not for it
                )
            except OSError as error:
                for link in (steps, blocks):
                    link.close()
                raise ResourceError(f"rank {rank} cannot be started: {error.strerror or error}") from None
        up: Link[Up] = Link(steps, Up)
        remote = RemoteRank(rank, up, Link[BlocksUp](blocks, BlocksUp), process)
        assert process.stdin is not None
        try:
            process.stdin.write(line(start))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead already; its end says why
        return remote


def meet(store: str, rank: int, world: int, device: str) -> Communicator:
    """The communicator of ranks on one machine that share the file `store`."""
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from bien.core.executors.process_group import ProcessGroup

    return ProcessGroup(
        FileStore(store, world), rank, world, torch.device(device), seconds=COLLECTIVE_SECONDS, host=HOST
    )
