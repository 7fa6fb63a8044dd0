"""The trace model: sessions of streams of turns, in counts and runs; no text needed.

Content is `BlockRuns` over virtual token ids (trace block id x block size + offset, unique inside the
session's scope). A turn's `output` is what the next recorded prompt of its stream holds at positions
in..in+out where it continues this turn's prompt, else fresh ids; the derived share is in the fidelity
report.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from bien.core.request import BlockRuns


class Turn(msgspec.Struct, gc=False):
    """One model call. Times in seconds; `gap` is end-to-start from the stream's previous turn, or from
    the spawning turn's end for a stream's first (from the session's start where there is none).

    A turn that joins sub-agents starts `gap` after the later of its stream's previous turn and the ends
    of those sub-agents: else the gap would count the recorded server's time once more.
    """

    input: BlockRuns
    output: BlockRuns
    gap: float = 0.0
    gap_kind: Literal["start", "think", "tool", "spawn"] = "think"
    tool: str = ""
    cached_tokens: int | None = None  # as recorded
    ttft: float | None = None
    duration: float | None = None
    stop: str = ""
    derived: int = 0  # leading output tokens that were derived from the next prompt
    joins: tuple[int, ...] = ()  # stream ids that must have ended before this turn starts

    @property
    def input_tokens(self) -> int:
        return len(self.input)

    @property
    def output_tokens(self) -> int:
        return len(self.output)


class Stream(msgspec.Struct, gc=False):
    """One conversation: the main agent's (id 0) or a sub-agent's."""

    id: int
    turns: list[Turn]
    parent: int | None = None
    spawned_after: int | None = None  # index of the parent's turn whose end spawns it; None: at start
    joined_before: int | None = None  # index of the parent's turn that waits for it; None: background
    label: str = ""


class Session(msgspec.Struct, gc=False):
    """A session tree. `scope` keys the materialised tokens: equal scope and id, equal token. A scope that
    equals the session's id is its own: no other session shares it. `start`: seconds, on a clock that all
    sessions of the trace share; None where the trace does not say when sessions began."""

    id: str
    streams: list[Stream]
    tenant: str = ""
    scope: str = ""
    provenance: str = ""
    start: float | None = None

    @property
    def turns(self) -> int:
        return sum(len(s.turns) for s in self.streams)

    @property
    def longest(self) -> int:
        """Largest prompt + output, in tokens."""
        return max((t.input_tokens + t.output_tokens for s in self.streams for t in s.turns), default=0)


class Fidelity(msgspec.Struct):
    """What an importer kept. `fields` maps a field to "exact", "derived", "estimated" or "lost"."""

    fields: dict[str, str] = {}
    notes: list[str] = []
    derived_output_tokens: int = 0
    output_tokens: int = 0


class TraceMeta(msgspec.Struct):
    format: str
    block_tokens: int
    source: str = ""
    fidelity: Fidelity = msgspec.field(default_factory=Fidelity)
