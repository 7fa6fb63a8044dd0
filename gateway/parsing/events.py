"""What an answer says, whatever dialect its model speaks. Every protocol's writer consumes these.

Kinds follow each other without overlap: a writer that needs blocks (Anthropic's, Responses') closes one and
opens the next whenever the kind or the call's index changes, and when a call ends. Text and arguments come in
any number of events; only their concatenation means something.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class Text(msgspec.Struct, frozen=True, gc=False):
    """Of the answer."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """A parser leaves `id` empty where its dialect has none; who consumes events always finds one."""

    index: int  # 0, 1, … in the order of the answer; one call is open at a time
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """JSON text. What came so far is always the beginning of a valid one."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """`complete`: the arguments are valid JSON. If not, the answer was cut inside of the call, or what came
    in it was no JSON, which then follows as text."""

    index: int
    complete: bool = True


Event = Reasoning | Text | CallBegin | CallArguments | CallEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind joined: equal for equal answers, however they were cut."""
    out: list[Event] = []
    parts: list[str] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, (Reasoning, Text, CallArguments)):
            same = type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0)
            if same:
                parts.append(event.text)
                continue
        _close(out, parts)
        out.append(event)
        parts = [event.text] if isinstance(event, (Reasoning, Text, CallArguments)) else []
    _close(out, parts)
    return out


def _close(out: list[Event], parts: list[str]) -> None:
    if len(parts) > 1:
        out[-1] = msgspec.structs.replace(out[-1], text="".join(parts))
