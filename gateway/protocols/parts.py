"""`Parts`: an answer as a row of parts (reasoning, text, calls), of which one at a time is open.

Anthropic calls them content blocks and OpenAI's Responses output items; both begin, grow and end one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bien.gateway.parsing.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from bien.gateway.protocols.ask import Choice, Usage
from bien.gateway.protocols.scores import Score

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Part:
    kind: Kind
    index: int  # in the answer
    name: str = ""  # of a call
    id: str = ""  # of a call
    pieces: list[str] = field(default_factory=list)
    complete: bool = True  # False: it was cut

    @property
    def text(self) -> str:
        """Of a call its arguments, as JSON."""
        return "".join(self.pieces)


class PartWriter(Protocol):
    """Events of a stream."""

    def began(self, part: Part) -> bytes: ...

    def grew(self, part: Part, text: str) -> bytes: ...

    def ended(self, part: Part) -> bytes: ...


class Parts:
    def __init__(self, writer: PartWriter) -> None:
        self.all: list[Part] = []
        self._writer = writer
        self._open: Part | None = None

    def take(self, events: Iterable[Event]) -> bytes:
        out: list[bytes] = []
        for event in events:
            if isinstance(event, CallBegin):
                out += (self.close(), self._begin("call", event.name, event.id))
            elif isinstance(event, CallEnd):
                if self._open is not None:
                    self._open.complete = event.complete
                out.append(self.close())
            elif event.text:
                out.append(self._grow(event))
        return b"".join(out)

    def close(self, *, cut: bool = False) -> bytes:
        """The part that is open, if any, has ended; `cut`: before its time."""
        part, self._open = self._open, None
        if part is None:
            return b""
        part.complete &= not cut
        return self._writer.ended(part)

    def _grow(self, event: Reasoning | Text | CallArguments) -> bytes:
        kind: Kind = "call"
        if not isinstance(event, CallArguments):
            kind = "text" if isinstance(event, Text) else "reasoning"
        out = b""
        if self._open is None or self._open.kind != kind:
            out = self.close() + self._begin(kind)
        part = self.all[-1]
        part.pieces.append(event.text)
        return out + self._writer.grew(part, event.text)

    def _begin(self, kind: Kind, name: str = "", id: str = "") -> bytes:
        self._open = Part(kind, len(self.all), name, id)
        self.all.append(self._open)
        return self._writer.began(self._open)


class InParts:
    """What answers that are written in parts share: see `Answer`."""

    _parts: Parts

    def piece(
        self,
        index: int,
        text: str,
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None = None,
    ) -> bytes:
        return self._parts.take([Text(text)])

    def said(
        self,
        index: int,
        events: Sequence[Event],
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None = None,
    ) -> bytes:
        return self._parts.take(events)


class _Silent:
    def began(self, part: Part) -> bytes:
        return b""

    def grew(self, part: Part, text: str) -> bytes:
        return b""

    def ended(self, part: Part) -> bytes:
        return b""


def parts_of(choice: Choice) -> list[Part]:
    """Of an answer that is not streamed."""
    parts = Parts(_Silent())
    parts.take([Text(choice.text)] if choice.events is None else choice.events)
    parts.close(cut=choice.finish == "length")
    return parts.all
