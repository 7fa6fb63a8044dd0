"""`TurnRecord`: what was seen of one turn. Times are seconds of the run's clock, -1 where it never came."""

from __future__ import annotations

import array

import msgspec

from bien.core.speculation.counts import DraftCounts


class TurnRecord(msgspec.Struct, gc=False):
    """The driver writes the first block, the target the second, `error` either of them."""

    session: str
    stream: int
    turn: int
    planned: float = -1.0
    sent: float = -1.0
    ended: float = -1.0
    prompt_tokens: int = 0
    asked: int = 0  # output tokens
    id: str = ""
    ready: float = -1.0  # the turn before it, and the sub-agents that it joins, had ended
    parent: int | None = None  # stream that spawned this one
    label: str = ""  # of the stream

    first: float = -1.0  # first chunk with content
    last: float = -1.0  # last chunk with content
    first_count: int = 0  # tokens in the first chunk
    got: int = 0  # output tokens
    cached: int = -1  # of the prompt, as the server counted; -1 unknown
    predicted: int = -1  # cached tokens that the router predicted; -1 unknown
    worker: str = ""
    drafted: int = -1  # speculation: totals of the request; -1 unknown
    accepted: int = -1
    rounds: int = -1
    drafts: DraftCounts | None = None  # the same by source and position; None unknown
    chunk_times: array.array[float] = msgspec.field(default_factory=lambda: array.array("d"))
    chunk_counts: array.array[int] = msgspec.field(default_factory=lambda: array.array("I"))

    error: str = ""
    overloaded: bool = False  # the error is a refusal for overload

    @property
    def ok(self) -> bool:
        return not self.error

    def chunk(self, now: float, count: int) -> None:
        """`count` tokens came at `now`."""
        if not self.got:
            self.first = now
            self.first_count = count
        self.last = now
        self.got += count
        self.chunk_times.append(now)
        self.chunk_counts.append(count)

    @property
    def ttft(self) -> float | None:
        """Send to first chunk."""
        return self.first - self.sent if self.first >= 0 else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first chunk."""
        rest = self.got - self.first_count
        return (self.last - self.first) / rest if rest > 0 else None

    @property
    def e2e(self) -> float | None:
        return self.last - self.sent if self.last >= 0 else None
