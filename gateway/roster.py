"""`Member`: what the gateway knows of one worker: its load, and the requests placed there."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import WorkerStats
from bien.gateway.checks import context_limit
from bien.gateway.routing import Target

if TYPE_CHECKING:
    from bien.gateway.stream import Stream

# A placement may miss the step that is under way when it arrives; the report after that one has it.
REPORTS_BEHIND = 2


class Member:
    def __init__(self, client: WorkerClient) -> None:
        self.client = client
        self.info = client.info
        self.id = client.info.id
        self.context = context_limit(client.info)
        self.stats = WorkerStats()
        self.streams: dict[int, Stream] = {}  # by rid; placed here and not ended
        self.unreported = 0  # prompt tokens to be computed that `stats` does not count yet
        self._rids = 0
        self._reports = 0
        self._fresh: deque[tuple[int, Stream]] = deque()

    def target(self, overlap: int) -> Target:
        if self.info.cached_in:  # blocks of an engine are larger than the index's
            overlap -= overlap % self.info.cached_in
        return Target(self.id, 0, self.info, self.stats, len(self.streams), self.unreported, overlap)

    def place(self, stream: Stream, uncached: int) -> int:
        """Book a request; its rid."""
        rid = self.number()
        self.streams[rid] = stream
        stream.member = self
        stream.unreported = uncached
        self.unreported += uncached
        self._fresh.append((self._reports + REPORTS_BEHIND, stream))
        return rid

    def number(self) -> int:
        """A rid that no request has had."""
        self._rids += 1
        return self._rids

    def remove(self, stream: Stream) -> None:
        """It has ended, or nobody wants it any more."""
        del self.streams[stream.rid]
        self.settle(stream)

    def settle(self, stream: Stream) -> None:
        """The worker has started it, or it is gone: it counts by reports only."""
        self.unreported -= stream.unreported
        stream.unreported = 0

    def report(self, stats: WorkerStats) -> None:
        self.stats = stats
        self._reports += 1
        while self._fresh and self._fresh[0][0] <= self._reports:
            _, stream = self._fresh.popleft()
            if stream.member is self:
                self.settle(stream)
