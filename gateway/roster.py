"""`Member`: what the gateway knows of one worker: its load, and the requests placed there."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bien.core.speculation.counts import DraftCounts
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import WorkerStats
from bien.gateway.checks import context_limit
from bien.gateway.routing import Target

if TYPE_CHECKING:
    from bien.gateway.stream import Stream

# A placement may miss the step that is under way when it arrives; the report after that one has it.
REPORTS_BEHIND = 2


class RankLoad:
    """What is known of the load of one engine."""

    def __init__(self) -> None:
        self.stats = WorkerStats()
        self.inflight = 0  # requests placed there and not ended
        self.unreported = 0  # prompt tokens to be computed that `stats` does not count yet
        self.unseen = 0  # the same of what other gateways have placed there, as the worker says
        self.reports = 0
        self.fresh: deque[tuple[int, Stream]] = deque()


class Member:
    def __init__(self, client: WorkerClient) -> None:
        self.client = client
        self.info = client.info
        self.id = client.info.id
        self.context = context_limit(client.info)
        self.doubted = False  # it may be gone, and has been asked: no target until it answers; by the gateway
        self.ranks = [RankLoad() for _ in range(client.info.dp_ranks)]
        self.streams: dict[int, Stream] = {}  # by rid; placed here and not ended
        self._rids = 0

    @property
    def usable(self) -> bool:
        """Whether requests may be placed here."""
        return self.client.alive and not self.doubted

    @property
    def stats(self) -> WorkerStats:
        """Of all ranks."""
        if len(self.ranks) == 1:
            return self.ranks[0].stats
        drafts = DraftCounts()
        for rank in self.ranks:
            drafts.merge(rank.stats.drafts or DraftCounts())
        counts = (name for name in WorkerStats.__struct_fields__ if name != "drafts")
        total = {name: sum(getattr(rank.stats, name) for rank in self.ranks) for name in counts}
        return WorkerStats(**total, drafts=drafts if drafts.sources else None)

    def target(self, overlap: int, dp_rank: int = 0) -> Target:
        if self.info.cached_in:  # blocks of an engine are larger than the index's
            overlap -= overlap % self.info.cached_in
        rank = self.ranks[dp_rank]
        ahead = rank.unreported + rank.unseen
        return Target(self.id, dp_rank, self.info, rank.stats, rank.inflight, ahead, overlap)

    def place(self, stream: Stream, uncached: int, dp_rank: int = 0) -> int:
        """Book a request; its rid."""
        rid, rank = self.number(), self.ranks[dp_rank]
        self.streams[rid] = stream
        stream.member = self
        stream.dp_rank = dp_rank
        stream.unreported = uncached
        rank.inflight += 1
        rank.unreported += uncached
        rank.fresh.append((rank.reports + REPORTS_BEHIND, stream))
        return rid

    def number(self) -> int:
        """A rid that no request has had."""
        self._rids += 1
        return self._rids

    def remove(self, stream: Stream) -> None:
        """It has ended, or nobody wants it any more."""
        del self.streams[stream.rid]
        self.ranks[stream.dp_rank].inflight -= 1
        self.settle(stream)

    def unplace(self, stream: Stream) -> None:
        """The latest booking never was."""
        if self.streams.get(stream.rid) is stream:
            self.remove(stream)
        fresh = self.ranks[stream.dp_rank].fresh
        if fresh and fresh[-1][1] is stream:
            fresh.pop()

    def settle(self, stream: Stream) -> None:
        """The worker has started it, or it is gone: it counts by reports only."""
        self.ranks[stream.dp_rank].unreported -= stream.unreported
        stream.unreported = 0

    def report(self, stats: WorkerStats, dp_rank: int = 0) -> None:
        rank = self.ranks[dp_rank]
        rank.stats = stats
        rank.reports += 1
        while rank.fresh and rank.fresh[0][0] <= rank.reports:
            _, stream = rank.fresh.popleft()
            if stream.member is self:
                self.settle(stream)
