"""`IndexFeed`: keeps an index in step with the workers' events; one that lost its place gets a snapshot, the
stored one where the index has a store, else the worker's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from bien.core.clock import Clock
from bien.core.errors import PluginFault
from bien.core.kv.events import EventBatch
from bien.core.worker.client import WorkerClient
from bien.gateway.faults import FAULTS
from bien.gateway.index import DurableIndex, KVIndex
from bien.gateway.metrics import Totals

log = logging.getLogger("bien.gateway")
PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between snapshots that did not suffice
STORED = 4  # attempts with the store, which is a little behind, before the worker is asked
Place = tuple[str, int]  # worker, dp_rank
T = TypeVar("T")


class IndexFeed:
    def __init__(self, index: KVIndex, clock: Clock, totals: Totals) -> None:
        self.resyncs = 0  # snapshots that a gap or a new generation made necessary
        self.asked = 0  # snapshots that workers had to send
        self.restored = 0  # times that the store had all there was to know
        self._index = index
        self._clock = clock
        self._totals = totals
        # By worker and rank:
        self._held: dict[Place, list[EventBatch]] = {}  # batches of those whose snapshot is on its way
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self.settled_with: Callable[[str], None] = lambda worker: None  # told of workers set to a snapshot

    def join(self, client: WorkerClient) -> None:
        """Start from the worker's snapshot: it may have run, and cached, for long."""
        self.leave(client.info.id)
        self._tell(client.info.id, lambda: self._index.join(client.info))
        for rank in range(client.info.dp_ranks):
            self._resync(client, rank, [])

    def leave(self, worker: str) -> None:
        for place in [place for place in self._tasks if place[0] == worker]:
            self._tasks.pop(place).cancel()
        for place in [place for place in self._held if place[0] == worker]:
            del self._held[place]
        self._tell(worker, lambda: self._index.leave(worker))

    def apply(self, client: WorkerClient, batch: EventBatch) -> None:
        held = self._held.get((client.info.id, batch.dp_rank))
        if held is not None:
            held.append(batch)
        elif not self._apply(batch):
            self.resyncs += 1
            self._resync(client, batch.dp_rank, [batch])

    async def settled(self, seconds: float) -> None:
        """Wait, at most so long, until the snapshots that are on their way have come."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=seconds)

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        """A prompt was sent to the worker, and is cached there for `ttl` seconds until events say so."""
        self._tell(worker, lambda: self._index.predict(worker, dp_rank, hashes, ttl))

    def take_back(self, worker: str, dp_rank: int, hashes: bytes) -> None:
        """The prompt was aborted there; what it has left in the cache, events say."""
        self.predict(worker, dp_rank, hashes, 0.0)

    def _apply(self, batch: EventBatch) -> bool:
        return self._tell(batch.worker, lambda: self._index.apply(batch)) is not False

    def _tell(self, worker: str, news: Callable[[], T]) -> T | None:
        # Frames, deaths and placements are handled above us: an index at fault must not stop any of them.
        try:
            return news()
        except FAULTS:
            self._totals.faults += 1
            log.exception("the index failed at news of worker %s", worker)
            return None

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._held.clear()
        if isinstance(self._index, DurableIndex):
            try:
                await self._index.stop()
            except FAULTS:
                self._totals.faults += 1
                log.exception("%s failed at its end", type(self._index).__name__)

    def _resync(self, client: WorkerClient, dp_rank: int, held: list[EventBatch]) -> None:
        place = client.info.id, dp_rank
        self._held[place] = held
        task = asyncio.get_running_loop().create_task(self._fetch(client, dp_rank, held))
        self._tasks[place] = task
        task.add_done_callback(lambda done: self._fetched(place, done))

    async def _fetch(self, client: WorkerClient, dp_rank: int, held: list[EventBatch]) -> None:
        worker, pause, attempts = client.info.id, PAUSE, 0
        while client.alive:
            restored = attempts < STORED and await self._restore(worker, dp_rank)
            attempts = attempts + 1 if restored else STORED
            batches = held[:] if restored else await self._ask(client, dp_rank, held)
            held.clear()
            if all(self._apply(batch) for batch in batches):
                self.restored += restored
                self.settled_with(worker)
                del self._held[worker, dp_rank]
                return
            if restored:
                held[:0] = batches  # what is missing before them may be on its way to the store
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _restore(self, worker: str, dp_rank: int) -> bool:
        if not isinstance(self._index, DurableIndex):
            return False
        try:
            return await self._index.restore(worker, dp_rank)
        except FAULTS:
            self._totals.faults += 1
            log.exception("the index failed to restore worker %s", worker)
            return False

    async def _ask(self, client: WorkerClient, dp_rank: int, held: list[EventBatch]) -> list[EventBatch]:
        """Set the index to the worker's own snapshot; what came while that travelled and follows it."""
        self.asked += 1
        snapshot = await client.snapshot(dp_rank)
        try:
            self._index.reset(client.info.id, dp_rank, snapshot.generation, snapshot.seq, snapshot.events)
        except FAULTS as error:
            self._totals.faults += 1
            raise PluginFault(f"the index failed at it: {error!r}") from error
        return [b for b in held if b.generation != snapshot.generation or b.seq > snapshot.seq]

    def _fetched(self, place: Place, task: asyncio.Task[None]) -> None:
        if self._tasks.get(place) is task:
            del self._tasks[place]
            self._held.pop(place, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning(
                "no snapshot of worker %s (%s); its cache counts as its next events say", place[0], error
            )
