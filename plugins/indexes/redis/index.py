"""`RedisIndex`: a mirror that can start from Redis, follows the stream, and notices what it has missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from bien.core.api import Context, EventBatch, KVEvent, ResourceError
from bien.gateway.api import (
    FIELD,
    Bid,
    DecodingError,
    Entry,
    IndexHealth,
    Keys,
    Lease,
    Publication,
    Reserved,
    WorkerInfo,
    ask,
    explained,
    fps_key,
    read_batches,
    read_entry,
    run_script,
)
from bien.plugins.indexes._mirror import Mirror
from bien.plugins.indexes._mirror.metrics import MirrorCollector
from bien.plugins.indexes.redis import RedisConfig
from bien.plugins.indexes.redis.leases import Leases
from bien.plugins.indexes.redis.link import Link
from bien.plugins.indexes.redis.metrics import IndexCollector
from bien.plugins.indexes.redis.reserve import Reserver
from bien.plugins.indexes.redis.starts import PAGE, Starts, order
from bien.plugins.indexes.redis.watched import Watched

# A write that changes nothing: a replica, or a server that is full, refuses it as it would refuse workers.
PROBE = "return redis.call('ZADD', KEYS[1], 'XX', 0, '')"
LEAVE_SECONDS = 0.5
AWAY = (0.1, 0.2, 0.5, 1.0)  # seconds between attempts while Redis is away
log = logging.getLogger("bien.gateway")


class RedisIndex:
    """A `DurableIndex`. Workers that `join` are connected: their frames feed the mirror, the stream only
    fills in. Those that are only followed (`follow`) are fed by the stream and their leases alone."""

    def __init__(self, config: RedisConfig, ctx: Context) -> None:
        self.undecodable = 0  # entries, snapshots and leases under our keys that nobody can read
        self.lost_leases = 0
        self.restores = 0  # caches taken from Redis
        self._config = config
        self._clock = ctx.clock
        self._mirror = Mirror(ctx.clock, config.table)
        self._link = Link(config.url, config.timeout_seconds, ctx.clock)
        self._leases = Leases(self._link, config.namespace, self._unreadable)
        self._starts = Starts(self._link, config.namespace, self._unreadable)
        self.reserver = Reserver(self._link, config, ctx)
        self._watched: dict[str, Watched] = {}
        self._cursors: dict[str, str] = {}  # by fp: where in its stream we are; "": not known yet
        self._heals: dict[tuple[str, int], asyncio.Task[bool]] = {}  # by worker and rank
        self.lease_lost: Callable[[str], None] = lambda worker: None  # as of a `LeasedIndex`
        self._unread = ""  # what the newest undecodable thing was
        self._unread_at = 0.0
        self._check_at = 0.0
        self._task: asyncio.Task[None] | None = None
        if ctx.metrics is not None:
            ctx.metrics.register(IndexCollector(self))
            ctx.metrics.register(MirrorCollector(self._mirror))

    # TieredIndex

    def join(self, info: WorkerInfo) -> None:
        self._watch(Watched(info, connected=True))

    def leave(self, worker: str) -> None:
        self._watched.pop(worker, None)
        for place in [place for place in self._heals if place[0] == worker]:
            self._heals.pop(place).cancel()
        self._mirror.leave(worker)

    def apply(self, batch: EventBatch) -> bool:
        return self._mirror.apply(batch)

    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        self._mirror.reset(worker, dp_rank, generation, seq, events)
        if (watched := self._watched.get(worker)) is not None:
            for entry in watched.unpark(dp_rank):
                self._offer(watched, entry)

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        self._mirror.predict(worker, dp_rank, hashes, ttl)

    def overlaps(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        return self._mirror.overlaps(hashes, targets)

    def loadable(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        return self._mirror.loadable(hashes, targets)

    def close(self) -> None:
        for task in (self._task, *self._heals.values()):
            if task is not None:
                task.cancel()
        self._starts.close()
        self._mirror.close()

    # DurableIndex

    @property
    def publication(self) -> Publication:
        return self._config.publication

    @property
    def leased(self) -> int:
        """Workers that have joined and hold a lease."""
        return sum(w.leased for w in self._watched.values())

    @property
    def up(self) -> bool:
        return self._link.up

    @property
    def failures(self) -> int:
        return self._link.failures

    @property
    def health(self) -> IndexHealth:
        seconds = self._clock.time() - self._link.since
        if not self._link.up:
            return IndexHealth("away", f"{self._link.name}: {self._link.reason}", seconds)
        missing = sorted(w.info.id for w in self._watched.values() if not w.leased and w.looked)
        if missing:
            return IndexHealth("degraded", f"without a lease: {', '.join(missing)}", seconds)
        if self._unread and self._clock.time() - self._unread_at < self._config.keep_seconds:
            return IndexHealth("degraded", f"{self.undecodable} times found {self._unread}", seconds)
        return IndexHealth("ok", "", seconds)

    async def start(self) -> None:
        try:
            await self._probe()
        except self._link.trouble as error:
            if self._config.on_failure == "refuse":
                await self._link.close()
                raise ResourceError(
                    f"the index cannot use Redis at {self._link.name}: {explained(error)}; start it, correct "
                    "the URL (--redis, gateway.kv_index.url), or serve without it until it is there: "
                    'gateway.kv_index.on_failure = "mirror"'
                ) from None
            self._link.failed(error)
        self._task = asyncio.create_task(self._run(), name="redis index")

    async def restore(self, worker: str, dp_rank: int) -> bool:
        watched = self._watched.get(worker)
        if watched is None:
            return False
        watched.park(dp_rank)
        if not self._link.up:
            return False  # known, and not to be waited for
        try:
            await self._cursor(watched.info.fp)  # before the stream is read: entries after it are followed
            start = await self._starts.read(watched.info, dp_rank)
        except self._link.trouble as error:
            self._failed(error)
            return False
        if start is None or self._watched.get(worker) is not watched:
            return False
        position = self._mirror.position(worker, dp_rank)
        if position is None or position.lost or position.seq <= start.last:  # else frames have overtaken it
            snapshot = start.snapshot
            self._mirror.reset(worker, dp_rank, snapshot.generation, snapshot.seq, snapshot.events)
            for batch in start.batches:
                self._mirror.apply(batch)
        for entry in watched.unpark(dp_rank):
            self._offer(watched, entry)
        self.restores += 1
        return True

    async def leases(self) -> list[Lease]:
        try:
            return await self._leases.all()
        except self._link.trouble as error:
            self._failed(error)
            return []

    async def stop(self) -> None:
        tasks = [t for t in (self._task, *self._heals.values()) if t is not None]
        for task in tasks:
            task.cancel()
        self._starts.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self.reserver.leave()
        except self._link.trouble:
            pass  # it is forgotten by itself
        await self._link.close()

    # Reservations

    def shared(self, fp: str) -> bool:
        return self.reserver.shared(fp)

    async def reserve(
        self, fp: str, places: Sequence[tuple[str, int]], bids: Sequence[Bid]
    ) -> Reserved | None:
        return await self.reserver.reserve(fp, places, bids)

    # What is beside the contract.

    def follow(self, info: WorkerInfo) -> None:
        """As `join`, for a worker that sends us no frames."""
        self._watch(Watched(info, connected=False))
        for rank in range(info.dp_ranks):
            self._heal(info.id, rank)

    def _watch(self, watched: Watched) -> None:
        self.leave(watched.info.id)
        self._mirror.join(watched.info)
        self._watched[watched.info.id] = watched
        self._cursors.setdefault(watched.info.fp, "")
        self._check_at = 0.0

    async def _run(self) -> None:
        attempts = 0
        while True:
            try:
                fps = {w.info.fp for w in self._watched.values()}
                # Frames of connected workers say the same, and sooner.
                followed = {w.info.fp for w in self._watched.values() if not w.connected}
                for fp in fps:
                    if fp in followed:
                        await self._follow(fp)
                    else:
                        self._cursors[fp] = ""
                if self._config.reservations:
                    await self.reserver.tick(fps)
                if self._clock.time() >= self._check_at:
                    await self._check()
                    pause = self._config.lease_seconds / (3 if self.leased == len(self._watched) else 12)
                    self._check_at = self._clock.time() + pause
                    if not self._watched:
                        await self._probe()
                self._link.works()
                attempts = 0
                await self._clock.sleep(self._config.poll_seconds)
            except self._link.trouble as error:
                self._failed(error)
                await self._clock.sleep(AWAY[min(attempts, len(AWAY) - 1)])
                attempts += 1
            except Exception:  # a fault of our own must not end it
                log.exception("following %s failed", self._link.name)
                await self._clock.sleep(AWAY[-1])

    async def _probe(self) -> None:
        """Whether keys of ours can be had and written, and scripts run."""
        await run_script(self._link.client, PROBE, (fps_key(self._config.namespace),))

    # The stream.

    async def _cursor(self, fp: str) -> str:
        if not self._cursors.get(fp):
            key = Keys(self._config.namespace, fp).events
            newest = await ask(self._link.client.xrevrange(key, count=1))
            self._cursors[fp] = self._cursors.get(fp) or (newest[0][0].decode() if newest else "0-0")
        return self._cursors[fp]

    async def _follow(self, fp: str) -> None:
        client = self._link.client
        key, cursor = Keys(self._config.namespace, fp).events, await self._cursor(fp)
        while True:
            page = await ask(client.xrange(key, min=f"({cursor}", max="+", count=PAGE))
            for id, fields in page:
                cursor = self._cursors[fp] = id.decode()
                try:
                    self._entry(read_entry(fields.get(FIELD, b"")))
                except DecodingError as error:
                    self._unreadable(error)
            if len(page) < PAGE:
                return

    def _entry(self, entry: Entry) -> None:
        watched = self._watched.get(entry.worker)
        if watched is None or entry.generation != watched.info.generation:
            return  # another life; leases tell which one is true
        if not watched.parked(entry):
            self._offer(watched, entry)

    def _offer(self, watched: Watched, entry: Entry) -> None:
        """Apply what continues the mirror; nearly always the frames were first."""
        position = self._mirror.position(entry.worker, entry.dp_rank)
        if position is None or entry.last <= position.seq:
            return
        if position.lost or entry.first > position.seq + 1:
            if not watched.connected:  # else frames are on their way, or the gateway restores it already
                self._heal(entry.worker, entry.dp_rank)
            return
        try:
            batches = read_batches(entry, len(watched.info.group_kinds))
        except DecodingError as error:
            self._unreadable(error)
            return
        for batch in batches:
            self._mirror.apply(batch)

    # Leases.

    async def _check(self) -> None:
        """Leases that came, went, or are another life's; mirrors that are behind what was published."""
        watched = list(self._watched.values())
        names = [Keys(self._config.namespace, w.info.fp).lease(w.info.id) for w in watched]
        for w, lease in zip(watched, await self._leases.read(names), strict=True):
            if self._watched.get(w.info.id) is w:
                self._compare(w, lease)
        for fp in {w.info.fp for w in watched}:
            await self._check_stream(fp)

    def _compare(self, watched: Watched, lease: Lease | None) -> None:
        id, info = watched.info.id, watched.info
        before, watched.looked = watched.leased, True
        watched.leased = lease is not None and lease.info.generation == info.generation
        if lease is None:
            if before:
                self.lost_leases += 1
                log.warning("worker %s has lost its lease in %s", id, self._link.name)
                if watched.connected:
                    self.lease_lost(id)
                else:
                    self._mirror.join(info)  # it may be gone: nothing is known of it
            watched.published = (0,) * info.dp_ranks
        elif not watched.leased:
            if not watched.connected:
                self.follow(lease.info)
        else:
            for rank, published in enumerate(watched.published):
                position = self._mirror.position(id, rank)
                behind = position is not None and (position.lost or position.seq < published)
                if behind or not (before or watched.connected):
                    self._heal(id, rank)
            watched.published = lease.seqs

    async def _check_stream(self, fp: str) -> None:
        """A stream that was deleted, or came back from an older copy, begins anew below our cursor."""
        newest = await ask(self._link.client.xrevrange(Keys(self._config.namespace, fp).events, count=1))
        cursor = self._cursors.get(fp, "")
        if cursor and (not newest or order(newest[0][0].decode()) < order(cursor)):
            self._cursors[fp] = "0-0"

    def _heal(self, worker: str, dp_rank: int) -> None:
        """Restore it beside all else."""
        place = worker, dp_rank
        if place not in self._heals:
            task = self._heals[place] = asyncio.create_task(self._catch_up(worker, dp_rank))
            task.add_done_callback(lambda done: self._healed(place, done))

    async def _catch_up(self, worker: str, dp_rank: int) -> bool:
        watched = self._watched.get(worker)
        if watched is None or (watched.connected and watched.parking(dp_rank)):
            return False  # the gateway restores it
        restored = await self.restore(worker, dp_rank)
        for entry in watched.unpark(
            dp_rank
        ):  # there are none unless it failed: then the next look tries again
            self._offer(watched, entry)
        return restored

    def _healed(self, place: tuple[str, int], task: asyncio.Task[bool]) -> None:
        if self._heals.get(place) is task:
            del self._heals[place]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker %s could not be restored from %s", place[0], self._link.name, exc_info=error)

    def _failed(self, error: Exception) -> None:
        self._link.failed(error)
        self._check_at = 0.0  # the next look says whether it works again

    def _unreadable(self, error: Exception) -> None:
        self.undecodable += 1
        self._unread_at = self._clock.time()
        text = str(error)
        if text != self._unread:
            self._unread = text
            log.warning("%s holds under the keys of this index %s; it is left out", self._link.name, text)
