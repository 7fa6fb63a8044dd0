"""What the dialects' objects have in common."""

from __future__ import annotations

from collections.abc import Callable

from bien.gateway.api import AnswerParser, Opening


class Dialect:
    """A dialect whose answers are read by `script`."""

    calls = True

    def __init__(
        self, script: Callable[[Opening], AnswerParser], marks: frozenset[str], *, exact: bool = False
    ) -> None:
        self._script = script
        self.marks = marks
        self.exact = exact

    def begin(self, opening: Opening) -> AnswerParser:
        return self._script(opening)

    def close(self) -> None:
        """Nothing to give back."""
