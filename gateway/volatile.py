"""`VolatileLines`: takes out what a client's program writes anew into each system prompt.

Claude Code begins its system prompt with a line like

    x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch=0a1b2;

in which `cch` changes with each request: nothing behind it would be found in a cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


class VolatileLines:
    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def without(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
        """Messages whose first one is a client's system prompt, and how many lines it has lost: those at its
        beginning that match a pattern as a whole. `messages` stay as they are."""
        text: str = messages[0]["content"]
        left, removed = text, 0
        while self._patterns and left:
            line, _, rest = left.partition("\n")
            if not any(pattern.fullmatch(line) for pattern in self._patterns):
                break
            left, removed = rest, removed + 1
        if not removed:
            return messages, 0
        first = [{**messages[0], "content": left}] if left else []
        return [*first, *messages[1:]], removed
