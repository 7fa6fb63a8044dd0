"""`Rank`: how far one engine of a worker has come in what is published of it."""

from __future__ import annotations

from dataclasses import dataclass

from bien.core.worker.messages import Snapshot

SNAPSHOT_ENTRIES = 1024  # after so many a new snapshot is due,
SNAPSHOT_BYTES = 1 << 16  # or when the events since the last one weigh twice as much as it, at least this


@dataclass(slots=True)
class Rank:
    """Written by `Publisher`."""

    number: int
    seq: int = 0  # of the newest batch in the stream
    least: int = 0  # a snapshot must hold this batch: it was dropped
    asked: bool = False  # a snapshot is on its way
    taken: tuple[Snapshot, str] | None = None  # not written yet; what follows it lies behind the id
    snapshot_at: str = ""  # id of the worker's newest entry when the last one was written; "": there is none
    snapshot_bytes: int = 0
    since_entries: int = 0  # since the last snapshot, as is the next
    since_bytes: int = 0

    @property
    def due(self) -> bool:
        """Whether to ask for a snapshot."""
        if self.asked or self.taken is not None:
            return False
        return (
            not self.snapshot_at
            or self.since_entries >= SNAPSHOT_ENTRIES
            or self.since_bytes > max(SNAPSHOT_BYTES, 2 * self.snapshot_bytes)
        )
