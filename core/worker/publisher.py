"""`Publisher`: a worker's lease, event batches and snapshots, written to Redis beside its work.

On the I/O thread's event loop. `add` only puts a batch down; one task writes what has gathered. While Redis
is away batches are kept up to a bound; beyond it a snapshot takes their place when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from bien.core.clock import WallClock
from bien.core.kv.events import EventBatch
from bien.core.worker.messages import Snapshot, WorkerInfo
from bien.core.worker.publish_scripts import APPEND, CLAIM, RELEASE, SNAPSHOT
from bien.core.worker.published import (
    Keys,
    Publication,
    fps_key,
    lease_fields,
    read_seqs,
    seq_field,
    seq_fields,
    write_entry,
    write_snapshot,
)
from bien.core.worker.published_rank import Rank
from bien.core.worker.redis_link import (
    ask,
    close_redis,
    explained,
    redis_client,
    redis_trouble,
    run_script,
)
from bien.core.worker.redis_url import masked
from bien.core.worker.threads import in_thread

MAX_KEPT = 8 << 20  # bytes of hashes that wait for Redis
MAX_ENTRY = 1 << 20  # bytes of hashes in one entry
EVENT_BYTES = 64  # of an event without its hashes
PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between attempts to reach a Redis that is away
log = logging.getLogger("bien.worker")


class Fenced(Exception):
    """Another life of this worker holds the lease."""


class Lost(Exception):
    """The lease is gone: it expired, or the server has forgotten it."""


class Publisher:
    def __init__(
        self, to: Publication, info: WorkerInfo, host: str, port: int, ask_snapshot: Callable[[int], None]
    ) -> None:
        """`ask_snapshot`, of a rank, is answered by `snapshot` some time later, in order with the batches."""
        self.ranks = [Rank(number) for number in range(info.dp_ranks)]
        self.failures = 0  # commands that failed
        self.dropped = 0  # batches that a snapshot had to replace
        self.connected = False
        self._to = to
        self._info = info
        self._host = host
        self._port = port
        self._ask_snapshot = ask_snapshot
        self._keys = Keys(to.namespace, info.fp)
        self._clock = WallClock()
        self._client: Any = redis_client(to.url, to.timeout_seconds)
        self._trouble = redis_trouble()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._kept: list[EventBatch] = []  # not in the stream yet
        self._kept_bytes = 0
        self._held = False  # the lease is ours, as far as we know
        self._taking = True  # the first claim takes the lease from an older life
        self._renewal = 0.0  # when the lease is to be renewed
        self._listing = 0.0  # when its fingerprint is to be listed again
        self._expires = False  # the stream, since this turn's claim
        self._at = "0-0"  # id of the newest entry of ours
        self._warned = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="publisher")

    def add(self, batch: EventBatch) -> None:
        """The worker's next batch."""
        self._kept.append(batch)
        self._kept_bytes += _weight(batch)
        if self._kept_bytes > MAX_KEPT:
            self.dropped += len(self._kept)
            for dropped in self._kept:
                rank = self.ranks[dropped.dp_rank]
                rank.least, rank.snapshot_at = dropped.seq, ""
            self._kept, self._kept_bytes = [], 0
        if self._held:
            self._wake.set()

    def hurry(self) -> None:
        """Somebody wants to start from what is published: what waits for more is written now."""
        self._hurry.set()

    def snapshot(self, snapshot: Snapshot) -> None:
        """What was asked for."""
        rank = self.ranks[snapshot.dp_rank]
        rank.asked = False
        rank.taken = snapshot, self._at
        self._wake.set()

    async def close(self) -> None:
        """Take the lease back, so that nobody looks for this worker any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            if self._held:
                keys = self._keys
                names = (keys.lease(self._info.id), keys.snapshot(self._info.id), keys.workers)
                async with asyncio.timeout(0.5):
                    await self._script(RELEASE, names, self._info.generation, self._info.id)
        except self._trouble:
            pass  # it expires by itself
        finally:
            await close_redis(self._client)

    # Below: on the task.

    async def _run(self) -> None:
        attempts = 0
        while True:
            try:
                await self._turn()
                attempts = 0
            except (Fenced, Lost) as error:
                self._held = False
                self._renewal = 0.0
                if isinstance(error, Fenced):
                    self._warn(f"another worker {self._info.id!r} has taken its lease: {error}")
                    await self._clock.sleep(self._to.lease_seconds / 3)
            except self._trouble as error:
                self.failures += 1
                self.connected = False
                self._renewal = 0.0  # who knows what is there when it is back
                self._warn(explained(error))
                await self._clock.sleep(PAUSES[min(attempts, len(PAUSES) - 1)])
                attempts += 1
            except Exception:  # a fault of our own: serving must not end with it
                self.failures += 1
                log.exception("worker %r failed to publish", self._info.id)
                await self._clock.sleep(PAUSES[-1])

    async def _turn(self) -> None:
        """Write what is due, then wait for more."""
        if self._clock.time() >= self._renewal:
            await self._claim()
        await self._flush()
        for rank in self.ranks:
            if rank.taken is not None:
                await self._write_snapshot(rank, *rank.taken)
            elif rank.due:
                rank.asked = True
                self._ask_snapshot(rank.number)
        if self._kept or any(rank.taken is not None for rank in self.ranks):
            return
        self._wake.clear()
        self._hurry.clear()
        try:
            async with asyncio.timeout(max(0.0, self._renewal - self._clock.time())):
                await self._wake.wait()
        except TimeoutError:
            return
        try:
            async with asyncio.timeout(self._to.flush_seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass

    async def _claim(self) -> None:
        to, keys, id = self._to, self._keys, self._info.id
        fields = lease_fields(self._info, self._host, self._port, *(rank.seq for rank in self.ranks))
        seqs = seq_fields(self._info)
        answer = await self._script(
            CLAIM,
            (keys.lease(id), keys.snapshot(id), keys.events, keys.workers),
            self._info.generation,
            _ms(to.lease_seconds),
            _ms(to.keep_seconds),
            "1" if self._taking else "0",
            id,
            to.stream_bytes,
            len(seqs),
            *seqs,
            *(part for pair in fields.items() for part in pair),
        )
        state = answer[0].decode()
        if state == "fenced":
            raise Fenced(answer[1].decode(errors="replace"))
        first, last, kept, now = answer[1].decode(), answer[2].decode(), answer[3], int(answer[4])
        there = read_seqs(answer[5])
        if state == "new" or not self.connected or self._clock.time() >= self._listing:
            await self._list(now)
        self._taking = self._expires = False
        self._held = True
        if not self.connected:
            self.connected = True
            if self._warned:
                log.warning("worker %r publishes again", id)
                self._warned = ""
        self._renewal = self._clock.time() + to.lease_seconds / 3
        self._check_ranks(state == "new", first, last, bool(kept), there)

    async def _list(self, now: int) -> None:
        """Say that there are workers of this fingerprint; in another slot of a cluster than the rest."""
        fps, keep = fps_key(self._to.namespace), _ms(self._to.keep_seconds)
        pipe: Any = self._client.pipeline(transaction=False)
        pipe.zadd(fps, {self._info.fp: now})
        pipe.zremrangebyscore(fps, "-inf", now - keep)
        pipe.pexpire(fps, keep)
        await ask(pipe.execute())
        self._listing = self._clock.time() + self._to.keep_seconds / 4

    def _check_ranks(self, new: bool, first: str, last: str, kept: bool, there: Sequence[int]) -> None:
        """Ask for snapshots where those that lie there, or what follows them, are not what we have written.
        The stream holds the ids `first` to `last`, the lease the numbers `there`."""
        older = _order(last) < _order(self._at)
        lost = older or any(seq < rank.seq for seq, rank in zip(there, self.ranks, strict=True))
        if new or lost:
            self._at = last
        for rank in self.ranks:
            if new:  # whatever lies there of this worker is another life's
                rank.snapshot_at, rank.taken = "", None
            elif lost:  # an older copy has taken the server's place
                rank.snapshot_at = ""
                if rank.taken is not None:
                    rank.taken = rank.taken[0], last
            elif (not kept and rank.snapshot_bytes) or self._trimmed(rank, first):
                rank.snapshot_at = ""

    def _trimmed(self, rank: Rank, first: str) -> bool:
        """Whether entries behind its snapshot may be gone from the stream, which begins at `first`."""
        if not rank.since_entries or not rank.snapshot_at:
            return False
        return not first or _order(first) > _order(rank.snapshot_at)

    async def _flush(self) -> None:
        while self._kept:
            kept, batches = self._kept, self._next()
            rank = self.ranks[batches[0].dp_rank]
            entry = write_entry(batches)
            answer = await self._script(
                APPEND,
                (self._keys.lease(self._info.id), self._keys.events),
                self._info.generation,
                self._to.stream_entries,
                seq_field(rank.number),
                batches[-1].seq,
                "" if self._expires else _ms(self._to.keep_seconds),
                entry,
            )
            self._at = self._checked(answer)
            self._expires = True
            rank.seq = batches[-1].seq
            rank.since_entries += 1
            rank.since_bytes += len(entry)
            if self._kept is kept:  # else all was dropped meanwhile
                written = set(map(id, batches))
                self._kept = [batch for batch in kept if id(batch) not in written]
                self._kept_bytes -= sum(map(_weight, batches))

    def _next(self) -> list[EventBatch]:
        """Of the rank of the oldest batch: as many as follow each other and make one entry."""
        found: list[EventBatch] = []
        weight = 0
        for batch in self._kept:
            if found and batch.dp_rank != found[0].dp_rank:
                continue
            if found and (weight >= MAX_ENTRY or batch.seq != found[-1].seq + 1):
                break  # or what lies between was dropped
            found.append(batch)
            weight += _weight(batch)
        return found

    async def _write_snapshot(self, rank: Rank, snapshot: Snapshot, at: str) -> None:
        taken = rank.taken
        data = await in_thread(write_snapshot, snapshot, at)  # frames must not wait for it
        if len(data) > self._to.snapshot_bytes:
            self._warn(f"its snapshot of {len(data)} bytes is larger than {self._to.snapshot_bytes}")
            data = b""
        self._checked(
            await self._script(
                SNAPSHOT,
                (self._keys.lease(self._info.id), self._keys.snapshot(self._info.id)),
                self._info.generation,
                str(rank.number),
                _ms(self._to.keep_seconds),
                data,
            )
        )
        if rank.taken is taken:
            rank.taken = None
        rank.snapshot_at = at if snapshot.seq >= rank.least else ""
        rank.snapshot_bytes = len(data)
        rank.since_entries = rank.since_bytes = 0

    def _checked(self, answer: list[bytes]) -> str:
        state, value = answer[0].decode(), answer[1].decode(errors="replace")
        if state == "fenced":
            raise Fenced(value)
        if state == "lost":
            raise Lost
        return value

    async def _script(self, text: str, keys: tuple[str, ...], *arguments: Any) -> Any:
        return await run_script(self._client, text, keys, *arguments)

    def _warn(self, why: str) -> None:
        if why != self._warned:  # once, not at each attempt
            self._warned = why
            log.warning("worker %r does not publish to %s: %s", self._info.id, masked(self._to.url), why)


def _weight(batch: EventBatch) -> int:
    return sum(len(event.hashes) + EVENT_BYTES for event in batch.events)


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _order(id: str) -> tuple[int, int]:
    ms, _, number = id.partition("-")
    return int(ms), int(number or 0)
