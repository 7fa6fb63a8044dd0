"""`Value`: a parameter's value as raw text, typed by its schema, as JSON text."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from typing import Any

from bien.gateway.parsing.json_text import quoted
from bien.gateway.parsing.tools import TYPES, kind_of

_NUMERIC = re.compile(r"[-+.0-9eE]*")
_WORDS = {"true": "boolean", "false": "boolean", "null": "null", "True": "boolean", "False": "boolean",
          "None": "null"}  # fmt: skip
_LONGEST_WORD = 64  # with blanks
_LONGEST_LITERAL = 1 << 16


class Value:
    """A string is handed on as it comes. Anything else is held until it ends: then it is taken as it is
    written, if that is JSON of one of `types`; what is not is a string after all."""

    def __init__(self, types: frozenset[str] = TYPES, *, trim: bool = False) -> None:
        """`trim`: the value stands between line breaks that are not its own, one at each side."""
        self._types = types - {"string"}
        self._string = "string" in types  # whether it may be one
        self._held: list[str] = []
        self._size = 0
        self._open = bool(self._types)  # whether it may still be anything but a string
        self._lead = ""  # its first character that is no blank
        self._begun = False  # as a string
        self._trim = trim
        self._first = True
        self._break = False  # a line break that may be the last one

    def push(self, text: str) -> str:
        """JSON text that may be sent now."""
        if self._trim and text:
            text = self._trimmed(text)
        return self._take(text) if text else ""

    def close(self) -> str:
        """The value has ended: the rest of its JSON text."""
        if self._begun:
            return '"'
        text = "".join(self._held)
        if self._open and (found := self._read(text)) is not None:
            return found
        return f'"{quoted(text)}"'

    def _trimmed(self, text: str) -> str:
        if self._first:
            self._first = False
            text = text.removeprefix("\n")
        if self._break:
            text = "\n" + text
        self._break = text.endswith("\n")
        return text[:-1] if self._break else text

    def _take(self, text: str) -> str:
        if self._open:
            self._held.append(text)
            self._size += len(text)
            self._open = self._undecided(text)
            if self._open:
                return ""
            text, self._held = "".join(self._held), []
        start, self._begun = "" if self._begun else '"', True
        return start + quoted(text)

    def _undecided(self, text: str) -> bool:
        """Whether all that came may still be anything but a string."""
        self._lead = self._lead or text.lstrip()[:1]
        if not self._lead:
            return True
        if self._lead == "{":
            return "object" in self._types
        if self._lead == "[":
            return "array" in self._types
        if self._lead == '"':
            return not self._string
        if self._lead in "-0123456789":
            numbers = "number" in self._types or "integer" in self._types
            return numbers and _NUMERIC.fullmatch(text.strip()) is not None
        if self._size > _LONGEST_WORD:
            return False
        begun = "".join(self._held).strip()
        return any(word.startswith(begun) for word, kind in _WORDS.items() if kind in self._types)

    def _read(self, text: str) -> str | None:
        text = text.strip()
        try:
            value = json.loads(text, parse_constant=_refuse)
            found = text
        except (ValueError, RecursionError):
            try:
                value = _literal(text)
                found = json.dumps(value, allow_nan=False)
            except (ValueError, TypeError, RecursionError):
                return None
        kind = kind_of(value)
        if (kind == "integer" and "number" in self._types) or (kind == "number" and "integer" in self._types):
            return found
        return found if kind in self._types or (kind == "string" and not self._string) else None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _literal(text: str) -> Any:
    """Models that were taught Python write its literals, or line breaks inside strings."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except ValueError:
        pass
    if len(text) > _LONGEST_LITERAL:
        raise ValueError("too long for a literal")
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that are none
            value = ast.literal_eval(text)
    except (SyntaxError, MemoryError) as error:
        raise ValueError("no literal") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("no JSON")
    return value
