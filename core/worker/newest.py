"""`Newest`: requests that a worker has accepted and whose work its stats do not show."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.report import SequenceOutput


class Newest:
    """A gateway knows what it has sent itself. What others have it would hear of when the step under way
    ends, or the next: stats no longer count tokens that a step in flight computes."""

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0  # of these the engine had been given so many, as of the last report,
        self._before = 0  # and of the one before
        self._queued = 0  # tokens that the stats of the last report count
        self._held: dict[str, tuple[int, int, int]] = {}  # by engine id: number, client, tokens

    def add(self, id: str, client: int, tokens: int) -> None:
        """The engine is sent a request of `client` with so many tokens to be computed."""
        self._sent += 1
        self._held[id] = self._sent, client, tokens

    def remove(self, id: str) -> None:
        self._held.pop(id, None)

    def reported(self, outputs: Iterable[SequenceOutput], queued: int, received: int) -> None:
        """The engine has given outputs, counts `queued` tokens, and had been given `received` requests."""
        self._before, self._received, self._queued = self._received, received, queued
        if not self._held:
            return
        for output in outputs:
            self.remove(output.id)
        for id in [id for id, (number, _, _) in self._held.items() if number <= self._before]:
            del self._held[id]

    def ahead_of(self, client: int) -> int:
        """Tokens of the others' requests, beyond those that stats count."""
        fresh = begun = 0
        for number, owner, tokens in self._held.values():
            if owner == client:
                continue
            if number > self._received:
                fresh += tokens
            else:  # it waits, and is counted; or it is being computed
                begun += tokens
        return fresh + max(0, begun - self._queued)
