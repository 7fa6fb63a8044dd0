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
        self.published = 0  # number of the newest batch in the stream
        self._parked: list[Entry] | None = None  # came while its start is being read; None: it is not

    @property
    def parking(self) -> bool:
        return self._parked is not None

    def park(self) -> None:
        """From now on entries wait: what is being read may be older than they are."""
        if self._parked is None:
            self._parked = []

    def parked(self, entry: Entry) -> bool:
        """Whether it waits now."""
        if self._parked is None:
            return False
        if len(self._parked) < MAX_PARKED:
            self._parked.append(entry)
        return True

    def unpark(self) -> list[Entry]:
        """Those that wait, in order; nothing waits any more."""
        entries, self._parked = self._parked or [], None
        return entries
