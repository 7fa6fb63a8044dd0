"""`Watched`: one worker whose published cache an index follows."""

from __future__ import annotations

from bien.gateway.api import Entry, WorkerInfo

MAX_PARKED = 1024  # entries; what is behind after so many is noticed by its lease


class Watched:
    def __init__(self, info: WorkerInfo, connected: bool) -> None:
        self.info = info
        self.connected = connected  # its frames feed the mirror
        self.leased = False  # as of the last look, as are the next
        self.looked = False  # there was one
        self.published = (0,) * info.dp_ranks  # of each rank: number of its newest batch in the stream
        self._parked: dict[int, list[Entry]] = {}  # by rank: came while its start is being read

    def parking(self, dp_rank: int) -> bool:
        return dp_rank in self._parked

    def park(self, dp_rank: int) -> None:
        """From now on entries wait: what is being read may be older than they are."""
        self._parked.setdefault(dp_rank, [])

    def parked(self, entry: Entry) -> bool:
        """Whether it waits now."""
        waiting = self._parked.get(entry.dp_rank)
        if waiting is None:
            return False
        if len(waiting) < MAX_PARKED:
            waiting.append(entry)
        return True

    def unpark(self, dp_rank: int) -> list[Entry]:
        """Those of a rank that wait, in order; nothing of it waits any more."""
        return self._parked.pop(dp_rank, [])
