"""What rank 0 and the other ranks of a group say to each other.

Two links per rank. Steps, down: `Join`, then `Allocate` and one `StepMessage` per step, behind it a `Settle`
where there is a device drafter; nothing answers a step. Up: `Here`, `Done` when it can join, has loaded and
has allocated, `Fault` as last words. Blocks: `ReadBlocks` and `WriteBlocks` down, `Blocks` or `Fault` up for
each. The end of a link is the end of the group.
"""

from __future__ import annotations

from typing import Union

import msgspec

from bien.core.executors.plan_wire import StepMessage
from bien.core.worker.start import Failed


class Here(msgspec.Struct, array_like=True, tag="here"):
    """The first message on each link: which rank, by which link, and the group's token."""

    rank: int
    link: str  # "steps" or "blocks"
    token: str
    pid: int = 0
    host: str = ""


class Join(msgspec.Struct, array_like=True, tag="join"):
    """Every rank is there: meet in the communicator, then load."""


class Allocate(msgspec.Struct, array_like=True, tag="allocate"):
    """As `Executor.allocate`."""

    blocks: tuple[int, ...]
    slots: int
    max_context: int


class Done(msgspec.Struct, array_like=True, tag="done"):
    """Ready to join; or loaded, then with its heads; or allocated."""

    first: int = 0  # KV head that it holds
    stop: int = 0  # behind the last one


class Fault(msgspec.Struct, array_like=True, tag="fault"):
    """Why a rank ends, or why blocks could not be moved."""

    failure: Failed


class ReadBlocks(msgspec.Struct, array_like=True, tag="read"):
    """What a rank does with blocks it does behind step `after`, whose yield it may not have heard of."""

    group: int
    blocks: list[int]
    after: int
    accepted: bytes | None = None  # as in StepMessage, of step `after`
    gained: bytes = b""


class WriteBlocks(msgspec.Struct, array_like=True, tag="write"):
    group: int
    blocks: list[int]
    after: int
    accepted: bytes | None = None
    gained: bytes = b""
    data: bytes = b""  # of the rank's heads, [layers, blocks, ...]


class Blocks(msgspec.Struct, array_like=True, tag="blocks"):
    """What was read, or b"" after writing."""

    data: bytes = b""


class Settle(msgspec.Struct, array_like=True, tag="settle"):
    """What the last step yielded, as in `StepMessage`: commit it, then draft."""

    accepted: bytes | None
    gained: bytes = b""


class Close(msgspec.Struct, array_like=True, tag="close"):
    """No step follows."""


Down = Union[Join, Allocate, StepMessage, Settle, Close]
Up = Union[Here, Done, Fault]
BlocksDown = Union[ReadBlocks, WriteBlocks]
BlocksUp = Union[Here, Blocks, Fault]
