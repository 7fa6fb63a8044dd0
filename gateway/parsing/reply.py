"""`Reply`: one answer on its way from tokens to events: parsed, its calls named, its reasoning counted."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

import msgspec

from bien.core.text.marks import Piece
from bien.gateway.parsing.events import CallBegin, CallEnd, Event, merged
from bien.gateway.parsing.parser import AnswerParser


class Reply:
    def __init__(self, begin: Callable[[bool], AnswerParser], *, parallel: bool = True) -> None:
        """`begin(ids)`: a parser of the answer, which comes as token ids or as text only. Without `parallel`
        the answer ends with its first call."""
        self._begin = begin
        self._parser: AnswerParser | None = None
        self._parallel = parallel
        self._broken = False  # whether a call is not complete
        self.calls = 0  # complete ones
        self.reasoning_tokens = 0  # from the mark that opens reasoning to the one that closes it

    @property
    def full(self) -> bool:
        """Whether the only call that is wanted is there: what follows is nobody's."""
        return not self._parallel and self.calls > 0

    @property
    def calling(self) -> bool:
        """Whether the answer, had it ended here, asks for its calls to be made."""
        return self.calls > 0 and not self._broken

    def take(self, pieces: Iterable[Piece], tokens: int = 1, *, ids: bool = True) -> list[Event]:
        """The events of what `tokens` tokens added."""
        if self._parser is None:
            self._parser = self._begin(ids)
        before, out = self._parser.reasoning, []
        for piece in pieces:
            out += self._parser.push(piece)
        if before or self._parser.reasoning:
            self.reasoning_tokens += tokens
        return self._seen(out)

    def finish(self, ended: bool) -> list[Event]:
        """Nothing more comes. `ended`: the model said so."""
        if self._parser is None:
            self._parser = self._begin(False)
        return self._seen(self._parser.finish(ended))

    def _seen(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if self.full:
                break
            if isinstance(event, CallBegin) and not event.id:
                event = msgspec.structs.replace(event, id=f"call_{uuid.uuid4().hex[:24]}")
            elif isinstance(event, CallEnd):
                self.calls += event.complete
                self._broken |= not event.complete
            out.append(event)
        return merged(out) if len(out) > 1 else out
