"""`Script`: an `AnswerParser` that is written as a coroutine; `Thinking`: one whose reasoning is in tags."""

from __future__ import annotations

import json
import re

from bien.core.text.marks import Piece
from bien.gateway.parsing.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from bien.gateway.parsing.json_text import quoted
from bien.gateway.parsing.parser import Opening
from bien.gateway.parsing.reader import Ended, Reader, Steps
from bien.gateway.parsing.values import Value

NAME = re.compile(r"\s*[\w.:/-]{0,256}\s*")
"""What may be a function's name, and every beginning of it."""
KEY = re.compile(r"[^<>]{0,1024}", re.DOTALL)
"""What may be a parameter's name."""


class Script:
    """A subclass gives `run`, which reads from `self.reader` and says what it finds.

    Unless `framed` is false, blanks next to marks frame them: they are no part of text or reasoning.
    """

    framed = True  # whether blanks next to marks are none of the text's

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self.tools = opening.tools
        self.reader = Reader(opening.exact)
        self.reasoning = False
        self.called = ""  # the name of the call that is open
        self._calls = 0
        self._parameters = 0  # of the open call
        self._events: list[Event] = []
        self._fresh = False  # blanks that come next frame a mark
        self._blanks: list[str] = []  # they frame a mark, if one comes next
        self._stray: list[str] = []
        self._steps = self.run()
        self._over = False
        self._resume()

    def run(self) -> Steps[None]:
        """Reads the whole answer; Ended may leave it."""
        raise NotImplementedError

    def push(self, piece: Piece) -> list[Event]:
        self.reader.feed(piece)
        self._resume()
        return self._taken()

    def finish(self, ended: bool) -> list[Event]:
        self.reader.close(ended)
        self._resume()
        recorded, rest = self.reader.recorded(), self.reader.rest()
        if self.called:
            self.end(complete=False)
        elif ended or not recorded:  # of an answer that was cut, a call without a name is left out
            self._tell(recorded + rest)
        else:
            self.frame()
        self._release()
        return self._taken()

    def reason(self, text: str) -> None:
        """This is reasoning."""
        if text := self._framed(text, True):
            self._events.append(Reasoning(text))

    def say(self, text: str) -> None:
        """This is the answer's text."""
        if text := self._framed(text, bool(self.tools)):
            self._events.append(Text(text))

    def frame(self) -> None:
        """Here is a mark."""
        self._blanks.clear()
        self._fresh = True

    def call(self, name: str, id: str = "") -> None:
        """A call begins."""
        self.frame()
        self.reader.forget()
        self.reasoning = False
        self.called, self._parameters = name, 0
        self._events.append(CallBegin(self._calls, name, id))

    def argue(self, text: str) -> None:
        """JSON text of the open call's arguments."""
        if text:
            self._events.append(CallArguments(self._calls, text))

    def stray(self, text: str) -> None:
        """What stands in a call where nothing should: it is text behind it."""
        self._stray.append(text)

    def end(self, *, complete: bool = True) -> None:
        self._events.append(CallEnd(self._calls, complete))
        self._calls += 1
        self.called = ""
        self.frame()
        stray, self._stray = "".join(self._stray), []
        if stray.strip():
            self.say(stray)

    def parameter(self, name: str) -> None:
        """One more of the call's parameters, which are written one by one; its value follows."""
        self.argue(f'{", " if self._parameters else "{"}"{quoted(name)}": ')
        self._parameters += 1

    def value(self, types: frozenset[str], marks: tuple[str, ...], *, trim: bool = False) -> Steps[str]:
        """The value of a parameter, raw, up to one of `marks`."""
        value = Value(types, trim=trim)
        found = yield from self.reader.until(marks, lambda text: self.argue(value.push(text)))
        self.argue(value.close())
        return found

    def end_parameters(self) -> None:
        """The end of a call whose parameters were written one by one."""
        self.argue("}" if self._parameters else "{}")
        self.end()

    def between(self, marks: tuple[str, ...]) -> Steps[str]:
        """Behind a parameter. A model that ends its answer here has left out closing marks only."""
        try:
            return (yield from self.reader.until(marks, self.stray))
        except Ended:
            if self.reader.ended:
                self.end_parameters()
            raise

    def arguments(self) -> Steps[bool]:
        """The open call's arguments as JSON, and its end."""
        valid = yield from self.content()
        if valid:
            self.end()
        return valid

    def content(self) -> Steps[bool]:
        """The open call's arguments as JSON. Nothing, or null, stands for none, a string that holds an object
        for the object. False: what comes is no JSON, and the call has ended."""
        yield from self.reader.blank()
        first = yield from self.reader.peek()
        if not first and self.reader.closed and not self.reader.ended:
            raise Ended
        if first == "{":
            valid = yield from self.reader.json(self.argue)
        else:
            held: list[str] = []
            valid = first in ("", "<") or (yield from self.reader.json(held.append))
            if valid:
                self.argue(unwrapped("".join(held)))
            else:
                self.stray("".join(held))
        if not valid:
            self.stray(self.reader.lost)
            self.end(complete=False)
        return valid

    def _tell(self, text: str) -> None:
        (self.reason if self.reasoning else self.say)(text)

    def _framed(self, text: str, holds: bool) -> str:
        if not self.framed:
            return text
        if self._fresh:
            text = text.lstrip()
            if not text:
                return ""
            self._fresh = False
        if not holds:
            return text
        body = text.rstrip()
        if not body:
            self._blanks.append(text)
            return ""
        held, self._blanks = "".join(self._blanks), [text[len(body) :]] if len(body) < len(text) else []
        return held + body

    def _release(self) -> None:
        blanks, self._blanks = "".join(self._blanks), []
        if blanks:
            self._events.append(Reasoning(blanks) if self.reasoning else Text(blanks))

    def _resume(self) -> None:
        if self._over:
            return
        try:
            next(self._steps)
        except (StopIteration, Ended):
            self._over = True

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class Thinking(Script):
    """Reasoning stands between `<think>` and `</think>` at the answer's beginning, of which the prompt may
    have written the first. A call ends it too, as models forget the second. A subclass gives `starts` and
    `read`."""

    starts: tuple[str, ...]  # marks at which calls begin

    def read(self, found: str) -> Steps[None]:
        """A call, behind the mark `found` of `starts`, which is recorded. A return before the call has begun
        makes all that is recorded what it would be without marks."""
        raise NotImplementedError

    def run(self) -> Steps[None]:
        starts = self.starts if self.tools else ()
        opened = self.opening.tail.rstrip().endswith("<think>")
        if not opened and self.opening.thinks:
            blanks = yield from self.reader.blank()
            opened = yield from self.reader.accept("<think>")
            if not opened and (yield from self.reader.accept("</think>")):  # once more than the prompt has it
                self.frame()
            elif not opened:
                self.say(blanks)
        if opened:
            self.frame()
            self.reasoning = True
        while self.reasoning:
            found = yield from self.reader.until(("</think>", *starts), self.reason)
            if found == "</think>":
                self.reasoning = False
                self.frame()
            else:
                yield from self._read(found)
        while True:
            found = yield from self.reader.until(starts, self.say)
            yield from self._read(found)

    def _read(self, found: str) -> Steps[None]:
        self.reader.record(found)
        yield from self.read(found)
        self._tell(self.reader.recorded())


def unwrapped(text: str) -> str:
    """Arguments that are no object as they were written; `text` is JSON, or nothing."""
    if text in ("", "null"):
        return "{}"
    try:
        value = json.loads(text)
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            value.encode()  # half a surrogate pair could not be sent
            return value
    except (ValueError, RecursionError):
        pass
    return text
