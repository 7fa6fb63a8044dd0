"""What parent and child say to each other over pipes: frames of msgpack, each behind its length."""

from __future__ import annotations

import struct

import msgspec

from bien.replay.route.variant import Seen, Variant
from bien.traces.model import Session

LENGTH = struct.Struct("<Q")


class Trace(msgspec.Struct, tag="trace"):
    """To a child, first."""

    sessions: list[Session]


class Task(msgspec.Struct, tag="task"):
    """To a child, one at a time."""

    variant: Variant


class Progress(msgspec.Struct, tag="progress"):
    """From a child."""

    turns: int


class Done(msgspec.Struct, tag="done"):
    """From a child: the task's end."""

    seen: Seen


class Failed(msgspec.Struct, tag="failed"):
    """From a child instead. `code`: of a BienError, else ""."""

    code: str
    text: str


ToChild = Trace | Task
FromChild = Progress | Done | Failed


def frame(message: ToChild | FromChild) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
