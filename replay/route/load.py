"""The trace, read once for all variants, and what of it fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from bien.core.errors import UserError
from bien.core.plugins import PluginManager
from bien.replay.route.infinite import check_unique
from bien.replay.traces import open_paths
from bien.traces.model import Session


class TraceCard(msgspec.Struct):
    """What is routed. Tokens are of all turns."""

    source: str = ""
    format: str = ""
    sessions: int = 0
    turns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    longest: int = 0  # prompt and output of one turn
    longest_session: str = ""
    skipped: int = 0  # sessions longer than a worker's capacity, left out


def read_sessions(
    paths: Sequence[Path], sessions: int | None, manager: PluginManager
) -> tuple[list[Session], TraceCard]:
    """The first `sessions` of the traces, or all.

    Raises:
        TraceError: a trace is damaged.
        UserError: there is no session, or none with a turn.
    """
    if sessions is not None and sessions < 1:
        raise UserError(f"--sessions is {sessions}; valid: 1 or more")
    trace = open_paths(paths, manager)
    try:
        found = check_unique([s for s in islice(trace.sessions(), sessions) if s.turns])
    finally:
        trace.close()
    if not found:
        raise UserError("the trace holds no session with a turn")
    return found, described(found, TraceCard(trace.meta.source, trace.meta.format))


def described(sessions: Sequence[Session], card: TraceCard) -> TraceCard:
    """`card` with the counts of these sessions."""
    turns = [t for session in sessions for stream in session.streams for t in stream.turns]
    longest = max(sessions, key=lambda s: s.longest)
    return msgspec.structs.replace(
        card,
        sessions=len(sessions),
        turns=len(turns),
        input_tokens=sum(t.input_tokens for t in turns),
        output_tokens=sum(t.output_tokens for t in turns),
        longest=longest.longest,
        longest_session=longest.id,
    )


def fitting(
    sessions: list[Session], card: TraceCard, capacity: int, block_tokens: int, skip: bool
) -> tuple[list[Session], TraceCard]:
    """Those that a worker of `capacity` tokens can hold; all of them unless `skip`.

    Raises:
        UserError: one is longer and is not to be left out, or all are.
    """
    room = capacity // block_tokens * block_tokens
    kept = [s for s in sessions if s.longest <= room]
    least = blocks_for(card.longest, block_tokens)
    if len(kept) == len(sessions):
        return sessions, card
    if not skip or not kept:
        longer = len(sessions) - len(kept)
        way = f", or --skip-longer to leave out {longer} of {len(sessions)} sessions" if kept else ""
        raise UserError(
            f"a worker's capacity is {capacity} tokens, and the longest turn of the trace needs "
            f"{card.longest} (session {card.longest_session}); valid: --capacity {least} or more{way}"
        )
    return kept, msgspec.structs.replace(described(kept, card), skipped=len(sessions) - len(kept))


def blocks_for(tokens: int, block_tokens: int) -> int:
    """`tokens` in whole blocks, as tokens."""
    return -(-tokens // block_tokens) * block_tokens
