"""`JsonText`: follows a JSON value as it comes, in time linear in its text.

What models write that is nearly JSON is mended on the way: line breaks inside strings, escapes that are none,
Python's True, False and None. What comes out is always the beginning of a valid text.
"""

from __future__ import annotations

import json
import re

_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ATOM = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_LONGEST = 1024  # of a number

# What is expected next:
_VALUE, _FIRST, _KEY, _ITEM, _COLON, _AFTER, _STRING, _ESCAPE, _ATOMIC = range(9)


class JsonText:
    def __init__(self) -> None:
        self.done = False  # the value is there
        self.failed = False  # what came is no JSON
        self._state = _VALUE
        self._open: list[str] = []  # brackets
        self._key = False  # whether the string is an object's key
        self._held = ""  # of an escape or a number

    @property
    def left(self) -> str:
        """What was taken and not given back."""
        return self._held if self._state == _ATOMIC else ""

    def push(self, text: str, at: int = 0) -> tuple[str, int]:
        """What of `text` from `at` is part of the value, mended, and where the value or what is no part of
        it begins: the end of the text unless `done` or `failed`."""
        out: list[str] = []
        end = len(text)
        while at < end and not (self.done or self.failed):
            at = self._step(text, at, out)
        return "".join(out), at

    def close(self) -> str:
        """Nothing more comes: a number at the top may be complete."""
        out: list[str] = []
        if self._state == _ATOMIC and not self._open and not self.failed:
            self._atom(out)
        return "".join(out)

    def _step(self, text: str, at: int, out: list[str]) -> int:
        state = self._state
        if state == _STRING:
            return self._string(text, at, out)
        if state == _ESCAPE:
            return self._escape(text, at, out)
        if state == _ATOMIC:
            end = _ATOM.match(text, at).end()  # type: ignore[union-attr]  # matches "" too
            end = min(end, at + _LONGEST - len(self._held))
            self._held += text[at:end]
            if len(self._held) == _LONGEST:
                self.failed = True
            elif end < len(text):
                self._atom(out)
            return end
        end = _BLANK.match(text, at).end()  # type: ignore[union-attr]
        out.append(text[at:end])
        if end == len(text):
            return end
        return self._structure(text[end], end, out)

    def _structure(self, char: str, at: int, out: list[str]) -> int:
        state = self._state
        closes = {"{": "}", "[": "]"}.get(self._open[-1], "") if self._open else ""
        if state in (_FIRST, _AFTER) and char == closes:
            self._open.pop()
            self._ended()
        elif state == _AFTER and char == ",":
            self._state = _KEY if closes == "}" else _ITEM
        elif state == _COLON and char == ":":
            self._state = _VALUE
        elif char == '"' and state not in (_COLON, _AFTER):
            self._key = state == _KEY or (state == _FIRST and closes == "}")
            self._state = _STRING
        elif char in "{[" and (state in (_VALUE, _ITEM) or (state == _FIRST and closes == "]")):
            self._open.append(char)
            self._state = _FIRST
        elif state in (_VALUE, _ITEM) or (state == _FIRST and closes == "]"):
            self._state = _ATOMIC
            self._held = ""
            if not _ATOM.match(char).end():  # type: ignore[union-attr]
                self.failed = True
            return at
        else:
            self.failed = True
            return at
        out.append(char)
        return at + 1

    def _string(self, text: str, at: int, out: list[str]) -> int:
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        out.append(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            out.append(char)
            if self._key:
                self._state = _COLON
            else:
                self._ended()
        elif char == "\\":
            self._state, self._held = _ESCAPE, ""
        else:
            out.append(json.dumps(char)[1:-1])
        return end + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if not self._held and char != "u":
            out.append("\\" + char if char in '"\\/bfnrt' else char if char == "'" else "\\\\")
            self._state = _STRING
            return at + 1 if char in "\"\\/bfnrt'" else at
        if self._held and char not in _HEX:  # "\user" is no escape
            out.append("\\\\" + self._held)
            self._state = _STRING
            return at
        self._held += char
        if len(self._held) == 5:
            out.append("\\" + self._held)
            self._state = _STRING
        return at + 1

    def _atom(self, out: list[str]) -> None:
        atom = _WORDS.get(self._held) or (self._held if _NUMBER.fullmatch(self._held) else "")
        if not atom:
            self.failed = True
            return
        out.append(atom)
        self._ended()

    def _ended(self) -> None:
        self._state = _AFTER
        self.done = not self._open


def quoted(text: str) -> str:
    """The inside of a JSON string; the concatenation of texts is that of their quotations."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
