"""An index with a store, in this process: what is stored is what its test says."""

from __future__ import annotations

from bien.core.clock import Clock
from bien.core.kv.events import EventBatch
from bien.core.worker.messages import Snapshot
from bien.core.worker.published import Lease, Publication
from bien.gateway.index import IndexHealth
from bien.plugins.indexes.memory import MemoryIndex


class StoredIndex(MemoryIndex):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.alive: dict[str, Lease] = {}
        self.stored: dict[str, tuple[Snapshot, list[EventBatch]]] = {}
        self.restores = 0
        self.fault: Exception | None = None
        self.ill = ""
        self.stopped = False

    @property
    def publication(self) -> Publication:
        return Publication("redis://nowhere")

    @property
    def health(self) -> IndexHealth:
        return IndexHealth("away" if self.ill else "ok", self.ill)

    async def start(self) -> None: ...

    async def restore(self, worker: str, dp_rank: int) -> bool:
        self.restores += 1
        await self._clock.sleep(0.001)
        if self.fault is not None:
            raise self.fault
        if worker not in self.stored:
            return False
        snapshot, batches = self.stored[worker]
        self.reset(worker, dp_rank, snapshot.generation, snapshot.seq, snapshot.events)
        return all(self.apply(batch) for batch in batches)

    async def leases(self) -> list[Lease]:
        await self._clock.sleep(0.001)
        return list(self.alive.values())

    async def stop(self) -> None:
        self.stopped = True
