"""What an infinite cache would have had of each turn, in the order and at the times of a run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bien.replay.record import TurnRecord
from bien.traces.model import Session
from bien.traces.prefix import PrefixTree


class InfiniteCache:
    """Of one trace. A session that is one stream and shares with no other has the same answer in every run:
    it is found once."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = {session.id: session for session in sessions}
        self._known: dict[str, list[int]] = {}

    def shared(self, records: Sequence[TurnRecord]) -> list[int]:
        """Tokens of each prompt, for turns in the order in which they were sent."""
        trees: dict[tuple[str, str], PrefixTree] = {}
        return [self._shared(record, trees) for record in records]

    def _shared(self, record: TurnRecord, trees: dict[tuple[str, str], PrefixTree]) -> int:
        session = self._sessions[record.session]
        if len(session.streams) == 1 and session.scope == session.id:
            return self._alone(session)[record.turn]
        turn = next(s for s in session.streams if s.id == record.stream).turns[record.turn]
        tree = trees.setdefault((session.tenant, session.scope), PrefixTree())
        found = tree.match(turn.input, record.sent)
        if record.got > 0:
            tree.insert(turn.input, record.sent)
            tree.insert(turn.input.join(turn.output), record.last)
        return min(found, len(turn.input))

    def _alone(self, session: Session) -> list[int]:
        found = self._known.get(session.id)
        if found is None:
            tree, found = PrefixTree(), []
            for turn in session.streams[0].turns:
                found.append(min(tree.match(turn.input), len(turn.input)))
                tree.insert(turn.input.join(turn.output))
            self._known[session.id] = found
        return found


def check_unique(sessions: Sequence[Session]) -> list[Session]:
    """The sessions with ids of their own: of several traces two may have the same one."""
    seen: dict[str, int] = {}
    out = []
    for session in sessions:
        count = seen[session.id] = seen.get(session.id, 0) + 1
        if count > 1:
            own = session.scope == session.id
            id = f"{session.id}#{count}"
            session = msgspec.structs.replace(session, id=id, scope=id if own else session.scope)
        out.append(session)
    return out
