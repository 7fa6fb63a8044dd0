"""Where a mirror can start: what Redis holds of an engine, snapshot and the batches after it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bien.core.api import EventBatch
from bien.gateway.api import (
    FIELD,
    DecodingError,
    Keys,
    Snapshot,
    WorkerInfo,
    ask,
    read_batches,
    read_entry,
    read_snapshot,
    seq_field,
)
from bien.plugins.indexes.redis.link import Link

PAGE = 256  # stream entries read at a time
STREAM_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


@dataclass(slots=True)
class Start:
    snapshot: Snapshot
    batches: list[EventBatch] = field(default_factory=list)  # that follow it without a gap

    @property
    def last(self) -> int:
        """Number of the newest batch in it."""
        return self.batches[-1].seq if self.batches else self.snapshot.seq


@dataclass(slots=True, eq=False)
class _Wanted:
    info: WorkerInfo
    dp_rank: int
    answer: asyncio.Future[Start | None]
    start: Start | None = None
    at: str = ""
    least: int = 0  # the lease says that this batch is in the stream

    @property
    def engine(self) -> tuple[str, int, str]:
        return self.info.id, self.dp_rank, self.info.generation


class Starts:
    """Engines asked for at the same time share one pass over the stream."""

    def __init__(self, link: Link, namespace: str, on_undecodable: Callable[[Exception], None]) -> None:
        self._link = link
        self._namespace = namespace
        self._undecodable = on_undecodable
        self._wanted: list[_Wanted] = []
        self._task: asyncio.Task[None] | None = None

    async def read(self, info: WorkerInfo, dp_rank: int) -> Start | None:
        """None: nothing is stored of this generation, or not all. Raises what the link's commands raise."""
        wanted = _Wanted(info, dp_rank, asyncio.get_running_loop().create_future())
        self._wanted.append(wanted)
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
        return await wanted.answer

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        wanted: list[_Wanted] = []
        try:
            while self._wanted:
                wanted, self._wanted = self._wanted, []
                for fp in {w.info.fp for w in wanted}:
                    await self._read(Keys(self._namespace, fp), [w for w in wanted if w.info.fp == fp])
        except BaseException as error:
            for w in (*wanted, *self._wanted):
                if not w.answer.done():
                    w.answer.set_exception(error) if isinstance(error, Exception) else w.answer.cancel()
            self._wanted = []
            if not isinstance(error, Exception):
                raise
        finally:
            self._task = None

    async def _read(self, keys: Keys, wanted: list[_Wanted]) -> None:
        engines = {w.engine: w for w in wanted}  # one of those that want the same
        await self._snapshots(keys, list(engines.values()))
        found = {(w.info.id, w.dp_rank): w for w in engines.values() if w.start is not None}
        if found:
            await self._batches(keys, found)
        for w in wanted:
            read = engines[w.engine]
            whole = read.start is not None and read.start.last >= read.least
            if not w.answer.done():
                w.answer.set_result(read.start if whole else None)

    async def _snapshots(self, keys: Keys, wanted: list[_Wanted]) -> None:
        pipe: Any = self._link.client.pipeline(transaction=False)
        for w in wanted:
            pipe.hget(keys.snapshot(w.info.id), str(w.dp_rank))
            pipe.hmget(keys.lease(w.info.id), "generation", seq_field(w.dp_rank))
        answers = await ask(pipe.execute(raise_on_error=False))
        for w, data, lease in zip(wanted, answers[::2], answers[1::2], strict=True):
            for answer in (data, lease):
                if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                    raise answer
            if isinstance(data, Exception) or isinstance(lease, Exception):
                self._undecodable(data if isinstance(data, Exception) else lease)
                continue
            if data is None or lease[0] != w.info.generation.encode():
                continue
            try:
                snapshot, w.at = read_snapshot(data, len(w.info.group_kinds))
                w.least = int(lease[1])
                order(w.at)
            except Exception as error:  # whatever it is, the others are read
                self._undecodable(DecodingError(f"of worker {w.info.id!r}: {error}"))
                continue
            if snapshot.generation == w.info.generation:
                w.start = Start(snapshot)

    async def _batches(self, keys: Keys, found: dict[tuple[str, int], _Wanted]) -> None:
        client = self._link.client
        cursor = min((w.at for w in found.values()), key=order)
        while True:
            page = await ask(client.xrange(keys.events, min=f"({cursor}", max="+", count=PAGE))
            for id, fields in page:
                cursor = id.decode()
                try:
                    self._entry(fields, found)
                except DecodingError as error:
                    self._undecodable(error)
            if len(page) < PAGE:
                return

    def _entry(self, fields: dict[bytes, bytes], found: dict[tuple[str, int], _Wanted]) -> None:
        entry = read_entry(fields.get(FIELD, b""))
        w = found.get((entry.worker, entry.dp_rank))
        if w is None or w.start is None or entry.generation != w.info.generation:
            return
        last = w.start.last
        if entry.last <= last:
            return
        if entry.first > last + 1:
            w.start = None  # some are missing in between
            return
        w.start.batches += [b for b in read_batches(entry, len(w.info.group_kinds)) if b.seq > last]


def order(id: str) -> tuple[int, int]:
    """Of a stream id. ValueError when it is none: Redis would refuse the command that holds it."""
    ms, _, number = id.partition("-")
    if not STREAM_ID.fullmatch(id) or max(int(ms), int(number or 0)) >= 1 << 64:
        raise ValueError(f"{id:.50!r} is no id of a stream")
    return int(ms), int(number or 0)
