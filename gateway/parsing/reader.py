"""`Reader`: the pieces of an answer, read as if all of them were there.

Its methods are coroutines: they yield where they need more, so that what a dialect reads cannot depend on how
the answer was cut. They hold back only what may be the beginning of what they look for.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from bien.core.text.marks import Mark, Piece
from bien.gateway.parsing.json_text import JsonText

T = TypeVar("T")
Steps = Generator[None, None, T]
Say = Callable[[str], None]


class Ended(Exception):
    """The answer ended where its dialect wants more."""


class Reader:
    def __init__(self, exact: bool = False) -> None:
        """`exact`: only `Mark`s are marks. If not, they are text, and any text that spells one is one."""
        self.ended = False  # whether the model ended the answer itself; once it is closed
        self.closed = False
        self.lost = ""
        self._exact = exact
        self._coming: deque[Piece] = deque()  # not looked at yet
        self._text = ""  # looked at from `_at` on
        self._at = 0
        self._record: list[str] | None = None

    def feed(self, piece: Piece) -> None:
        self._coming.append(piece.text if isinstance(piece, Mark) and not self._exact else piece)

    def close(self, ended: bool) -> None:
        self.closed, self.ended = True, ended

    def record(self, text: str = "") -> None:
        """From here on all that is read is kept, behind `text`."""
        self._record = [text]

    def forget(self) -> None:
        self._record = None

    def recorded(self) -> str:
        """What was kept, which is forgotten now."""
        found, self._record = self._record or [], None
        return "".join(found)

    def until(self, marks: tuple[str, ...], say: Say) -> Steps[str]:
        """Hand text on up to the first of `marks`, which is returned. Ended: there is none, and all is handed
        on. Other `Mark`s, if exact, are nothing."""
        pattern = _pattern(marks)
        while True:
            self._load()
            found = None if self._exact or pattern is None else pattern.search(self._text, self._at)
            if found is not None:
                self._pass(found.start(), say)
                self._pass(found.end())
                return found[0]
            if self._coming:  # exact: a mark
                self._pass(len(self._text), say)
                mark = self._mark()
                if mark in marks:
                    return mark
                continue
            held = 0 if self._exact or self.closed else _held(self._text, self._at, marks)
            self._pass(len(self._text) - held, say)
            if self.closed:
                raise Ended
            yield

    def collect(self, marks: tuple[str, ...], fits: re.Pattern[str]) -> Steps[tuple[str, str] | None]:
        """The text before one of `marks`, and which it was; None where text comes that fits neither.

        `fits` matches every beginning of what it matches, and nothing that a mark begins with.
        """
        text = ""
        while True:
            self._load()
            more = text + self._text[self._at :]
            end = fits.match(more).end()  # type: ignore[union-attr]  # matches "" too
            self._pass(self._at + end - len(text))
            if end < len(more):
                for mark in marks:
                    if (yield from self.accept(mark)):
                        return more[:end], mark
                return None
            text = more
            if self._coming:
                mark = next((m for m in marks if self._coming[0] == Mark(m)), "")
                if mark:
                    self._mark()
                return (text, mark) if mark else None
            if self.closed:
                raise Ended
            yield

    def blank(self) -> Steps[str]:
        """Blanks, up to something else or the end."""
        out: list[str] = []
        while True:
            self._load()
            end = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches "" too
            self._pass(end, out.append)
            if end < len(self._text) or self._coming or self.closed:
                return "".join(out)
            yield

    def peek(self) -> Steps[str]:
        """The next character; "" at a mark, if exact, and at the end."""
        while True:
            self._load()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._coming or self.closed:
                return ""
            yield

    def accept(self, text: str) -> Steps[bool]:
        """Whether `text`, or the mark that it spells, comes next; it is read if it does."""
        while True:
            self._load()
            if self._at == len(self._text) and self._coming:
                if found := self._coming[0] == Mark(text):
                    self._mark()
                return found
            if self._text.startswith(text, self._at):
                self._pass(self._at + len(text))
                return True
            if self.closed or self._coming or not text.startswith(self._text[self._at :]):
                return False
            yield

    def json(self, say: Say) -> Steps[bool]:
        """Hand a JSON value on. False: what comes next is none, or no longer one; `lost` is what was read of
        it and not handed on. Ended: in its middle."""
        value = JsonText()
        while True:
            self._load()
            passed, end = value.push(self._text, self._at)
            self._pass(end)
            if passed:
                say(passed)
            if value.done or value.failed:
                self.lost = value.left
                return value.done
            if self._coming or self.closed:
                if passed := value.close():
                    say(passed)
                if self.closed and not self._coming and not (value.done or value.failed):
                    raise Ended
                self.lost = value.left
                return value.done
            yield

    def rest(self) -> str:
        """What was not read, once closed."""
        self._load()
        out = [self._text[self._at :]]
        while self._coming:
            self._mark()
            self._load()
            out.append(self._text)
        self._text, self._at = "", 0
        return "".join(out)

    def _load(self) -> None:
        if self._coming and not isinstance(self._coming[0], Mark):
            parts = [self._text[self._at :]]
            while self._coming and not isinstance(self._coming[0], Mark):
                parts.append(self._coming.popleft())  # type: ignore[arg-type]
            self._text, self._at = "".join(parts), 0

    def _mark(self) -> str:
        """Read a mark that comes next."""
        mark = self._coming.popleft()
        assert isinstance(mark, Mark)
        if self._record is not None:
            self._record.append(mark.text)
        return mark.text

    def _pass(self, end: int, say: Say | None = None) -> None:
        if end <= self._at:
            return
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        if say is not None:
            say(text)


_BLANK = re.compile(r"\s*")


@lru_cache(maxsize=256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None


@lru_cache(maxsize=256)
def _heads(marks: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Finds a mark's first character; the length of the longest beginning of one."""
    first = re.compile(f"[{re.escape(''.join({mark[0] for mark in marks}))}]")
    return first, max(map(len, marks)) - 1


def _held(text: str, at: int, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is the beginning of a mark."""
    if not marks:
        return 0
    first, longest = _heads(marks)
    for found in first.finditer(text, max(at, len(text) - longest)):
        tail = text[found.start() :]
        if any(mark.startswith(tail) for mark in marks):
            return len(tail)
    return 0
