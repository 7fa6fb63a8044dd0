"""`Tally`: the running totals of a replay, read by the progress display while the driver writes them."""

from __future__ import annotations

import hashlib

import msgspec

from bien.traces.model import Session
from bien.traces.stats import Measure


class Tally(msgspec.Struct):
    """Counts so far. Tokens are of turns that ended without an error."""

    sessions_started: int = 0
    sessions_completed: int = 0
    sessions_failed: int = 0
    sessions_skipped: int = 0  # longer than the window
    turns: int = 0  # ended
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Corpus:
    """What was read, against what of it was replayed: content hash and shares kept."""

    def __init__(self, block_tokens: int, exponent: int) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._original = Measure(block_tokens)
        # The same until they differ: at full size nothing does but what is left out.
        self._taken = Measure(block_tokens) if exponent else self._original
        self._exponent = exponent

    def read(self, session: Session, taken: bool) -> None:
        """A session of the trace, as recorded, and whether `take` will follow."""
        if not taken and self._taken is self._original:
            self._taken = self._original.clone()
        self._original.add(session)
        update = self._hash.update
        update(f"\n{session.id}\0{session.scope}\0{session.tenant}".encode())
        if session.start is not None:
            update(f"@{session.start:.6f}".encode())
        for stream in session.streams:
            about = f"\n{stream.id} {stream.parent} {stream.spawned_after} {stream.joined_before}".encode()
            parts = [about]
            for turn in stream.turns:
                parts += f"\n{turn.gap:.6f} {turn.joins}".encode(), turn.input.packed, turn.output.packed
            update(b"".join(parts))

    def take(self, session: Session) -> None:
        """It is replayed, in this scaled form."""
        if self._taken is not self._original:
            self._taken.add(session)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    @property
    def turns_taken(self) -> int:
        return self._taken.stats.turns

    def shares(self, turns_done: int, tokens_done: int) -> tuple[float, float, float]:
        """(turns, tokens, reuse) kept of the original; scaled tokens count 2^k each.

        Reuse is a property of the sessions taken, in trace order: what the original's prompts share with
        earlier content, against what the scaled ones share.
        """
        original, taken = self._original.stats, self._taken.stats
        size = 1 << self._exponent
        tokens = original.input_tokens + original.output_tokens
        return (
            turns_done / original.turns if original.turns else 1.0,
            min(1.0, tokens_done * size / tokens) if tokens else 1.0,
            min(1.0, taken.reused * size / original.reused) if original.reused else 1.0,
        )
