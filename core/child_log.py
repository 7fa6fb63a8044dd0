"""`ChildLog`: what a child process says on stderr."""

from __future__ import annotations

import logging
import os
from collections import deque

from bien.core.errors import nearest

LINES = 40  # kept for error messages
FORMAT = "%(levelname)s %(message)s"  # so that a parent can say the same at that level
_LEVELS = {name: logging.getLevelNamesMapping()[name] for name in ("WARNING", "ERROR", "CRITICAL")}


def log_to_parent() -> None:
    """For a child: log to stderr in the form that its parent reads, from level BIEN_LOG (WARNING) on."""
    levels = logging.getLevelNamesMapping()
    wanted = os.environ.get("BIEN_LOG", "WARNING")
    logging.basicConfig(level=levels.get(wanted.upper(), logging.WARNING), format=FORMAT)
    if wanted.upper() not in levels:
        logging.warning("BIEN_LOG is %r; %s", wanted, nearest(wanted.upper(), levels))


class ChildLog:
    """Says each line again in `log`, and keeps the last ones.

    A line has the level that it begins with. Lines that begin with none belong to the one before, as those
    of a traceback do; what was printed before any is of level INFO.
    """

    def __init__(self, log: logging.Logger, who: str) -> None:
        self._log, self._who = log, who
        self._level = logging.INFO
        self._tail: deque[str] = deque(maxlen=LINES)

    def add(self, text: bytes) -> None:
        """One line of its stderr."""
        words = text.decode(errors="replace").rstrip()
        self._tail.append(words)
        level, _, message = words.partition(" ")
        if level in _LEVELS:
            self._level, words = _LEVELS[level], message
        elif level in ("INFO", "DEBUG"):
            self._level, words = logging.INFO, message
        self._log.log(self._level, "%s: %s", self._who, words)

    @property
    def last(self) -> str:
        """The last lines in one, or nothing."""
        return " | ".join(self._tail)
