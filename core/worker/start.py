"""What a parent and a starting worker process say to each other, over the child's stdin and stdout.

Down: one `WorkerStart`. Up: `Progress` any number of times, then `Ready` or `Failed`. Both ways JSON, one
line per message. Stdin stays open: its end tells the child that the parent is gone.
"""

from __future__ import annotations

import secrets
from typing import Any, Union

import msgspec

from bien.core.compose import Composition
from bien.core.cores import available_cores, share_threads
from bien.core.deployment import ModelSpec, PoolSpec
from bien.core.entry_points import PluginRef
from bien.core.errors import BienError, UserError, error_kinds
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.published import Publication

BUILDER = "bien.core.build:build_worker"
MAX_MESSAGE = 8000  # characters of an error; a line must fit into the parent's stream buffer


class WorkerStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a worker process needs. Written by the parent, sent over a pipe, never by argument."""

    id: str
    model: ModelSpec = ModelSpec()
    pool: PoolSpec = PoolSpec()
    plugins: tuple[PluginRef, ...] = ()  # the exact list to load
    threads: int = 1
    token: str = ""  # what a gateway must show when it joins
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    epoch: int = 0  # grows with each restart; part of the worker's generation
    seed: int | None = None  # of the engine's generator; None: from the system
    die_with_parent: bool = True  # ask the kernel for a signal when the starting thread ends
    publication: Publication | None = None  # where to publish lease, events and snapshots
    builder: str = BUILDER  # "module:function" that takes this and returns a BuiltWorker


def assign(composition: Composition, model: ModelSpec | None = None) -> list[WorkerStart]:
    """One start message per worker of every pool ("main-0", "main-1", ...), with one token for all.

    `model` stands in for the composition's, e.g. with the folder that its name was resolved to.

    Threads that a pool leaves open: the cores that are left, shared evenly by all workers, at least one.
    ResourceError when the threads exceed the cores (see `share_threads`).
    """
    pools = composition.deployment.pool
    shares, _ = share_threads(pools, composition.deployment.host, available_cores())
    token = secrets.token_hex(16)
    return [
        WorkerStart(
            id=f"{pool.name}-{i}",
            model=model or composition.model,
            pool=pool,
            plugins=composition.refs(pool.name),
            threads=threads,
            token=token,
        )
        for pool, threads in zip(pools, shares, strict=True)
        for i in range(pool.count)
    ]


class Progress(msgspec.Struct, tag="progress"):
    text: str


class Ready(msgspec.Struct, tag="ready"):
    """The worker accepts gateways at host and port."""

    host: str
    port: int
    info: WorkerInfo


class Failed(msgspec.Struct, tag="failed"):
    """A BienError of the child; `code` names its class."""

    code: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: BienError) -> Failed:
        return cls(error.code, str(error)[:MAX_MESSAGE], getattr(error, "field", None))

    def revive(self) -> BienError:
        """The error as it was. A class that only the child knows comes back as its nearest known base."""
        kind = error_kinds().get(self.code, BienError)
        if issubclass(kind, UserError):
            return kind(self.message, field=self.field)
        return kind(self.message)


FromChild = Union[Progress, Ready, Failed]

_decoder: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)


def line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read(data: bytes) -> FromChild:
    """One line of a child. msgspec.DecodeError when it is none."""
    return _decoder.decode(data)
