"""`Notes`: what a gateway did to one prompt, and found in it, for headers of its answer and for /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

REMOVED = "x-bien-removed-lines"
REWRITTEN = "x-bien-rewritten-at"


class Rewrite(NamedTuple):
    """A conversation went on, and its prompt is not what was computed for it before, and more."""

    at: int  # tokens that are still the same
    part: Literal["prompt", "answer"]  # of the turn before, where the first difference lies


class Turn(NamedTuple):
    """What a conversation's next prompt is held against."""

    key: bytes  # the conversation up to here, and whose it is
    prompt: bytes  # ids, uint32-LE
    before: bytes | None  # key of the turn that this one goes on from


@dataclass(slots=True)
class Notes:
    """Written with the prompt."""

    removed: int = 0  # volatile lines
    rewrite: Rewrite | None = None
    turn: Turn | None = None  # None: no conversation

    def headers(self) -> dict[str, str]:
        found = {}
        if self.removed:
            found[REMOVED] = str(self.removed)
        if self.rewrite is not None:
            found[REWRITTEN] = str(self.rewrite.at)
        return found
