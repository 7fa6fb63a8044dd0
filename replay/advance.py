"""`advance`: what is left of a session that is under way, and the prompt that its cache holds by then.

After AgentX (InferenceX, AIPerf): a replay that starts all sessions at their first turn sees short prompts
and cold caches for most of an hour, which no server in use does.
"""

from __future__ import annotations

import msgspec

from bien.core.request import BlockRuns
from bien.traces.model import Session, Stream


class Advanced(msgspec.Struct, frozen=True):
    """`warm`: the last prompt before, to be computed once; None: the session starts at its first turn."""

    session: Session
    warm: BlockRuns | None


def advance(session: Session, part: float) -> Advanced:
    """The session from that part of its main stream's turns on, at least its last turn. Sub-agents that were
    spawned before are history, also where a later turn joins them. The first turn left comes at once."""
    main = session.streams[0]
    first = min(int(part * len(main.turns)), len(main.turns) - 1)
    if first <= 0:
        return Advanced(session, None)
    kept = {main.id}
    for stream in session.streams[1:]:  # parents come before their children
        if stream.parent in kept and (
            stream.parent != main.id or (stream.spawned_after is not None and stream.spawned_after >= first)
        ):
            kept.add(stream.id)
    streams = [_from(main, first)]
    for stream in session.streams[1:]:
        if stream.id in kept:
            streams.append(_moved(stream, first) if stream.parent == main.id else stream)
    return Advanced(msgspec.structs.replace(session, streams=streams), main.turns[first - 1].input)


def _from(main: Stream, first: int) -> Stream:
    turns = main.turns[first:]
    return msgspec.structs.replace(main, turns=[msgspec.structs.replace(turns[0], gap=0.0), *turns[1:]])


def _moved(stream: Stream, first: int) -> Stream:
    def back(turn: int | None) -> int | None:
        return None if turn is None else turn - first

    return msgspec.structs.replace(
        stream, spawned_after=back(stream.spawned_after), joined_before=back(stream.joined_before)
    )
