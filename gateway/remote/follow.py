"""`Follower`: from an engine's messages to events of our own index, whatever gets lost between.

Messages are numbered from 0 in each life of an engine, and may be asked for again as long as it keeps them.
What was missed and is not to be had may have removed blocks: then all that is known is forgotten, since an
index that knows too little costs a recompute, and one that lies sends requests astray for as long as it does.
The same holds for a message that cannot be decoded or applied. Nothing that an engine says ends the
following: it would say the same again when it is asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol, Union

from bien.core.kv.events import KVEvent
from bien.gateway.remote.alarms import EventWatch
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.wire import Cleared, Message, Stored, UndecodableError, decode, short

NAMED = 8  # unknown types of one message
log = logging.getLogger("bien.remote")


class Numbered(NamedTuple):
    seq: int
    payload: bytes


class Lost(NamedTuple):
    """The connection broke; it is made again, perhaps to another process."""


class Source(Protocol):
    """Where messages come from: two sockets (zmq_source.py), or a script."""

    replays: bool
    """Whether earlier messages can be asked for."""

    def __aiter__(self) -> AsyncIterator[Union[Numbered, Lost]]: ...

    async def replay(self, start: int) -> list[Numbered] | None:
        """Those from number `start` on that the engine still has, in order. None: no answer."""
        ...

    async def close(self) -> None: ...


class Follower:
    """`emit` gets what changes; `renew` is called when all that was known is forgotten."""

    def __init__(
        self,
        source: Source,
        groups: Sequence[BlockMap],
        kinds: Sequence[str],
        rank: int,
        watch: EventWatch,
        emit: Callable[[list[KVEvent]], None],
        renew: Callable[[], None],
    ) -> None:
        self.ready = asyncio.Event()  # set once what the engine had before is known, as far as it can be
        self._source = source
        self._groups = groups
        self._kinds = kinds
        self._rank = rank
        self._watch = watch
        self._emit = emit
        self._renew = renew
        self._next: int | None = None  # number of the message that comes next; None: any
        self._live = -1  # newest number that was published to us, not replayed
        self._since = 0  # number of the first message behind the newest one that may have said anything
        self._doubt = False  # whether it may be another process by now
        self._lock = asyncio.Lock()  # messages are applied in order, those heard again too

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with self._lock:
                if self._source.replays:
                    await self._refill(0)
        except Exception as error:
            self._failed(error)
        self.ready.set()
        async for item in self._source:
            if isinstance(item, Lost):
                self._doubt = self._next is not None
                continue
            try:
                async with self._lock:
                    await self._take(item)
            except Exception as error:
                self._failed(error)

    async def relearn(self) -> None:
        """Hear again what the engine has told: blocks that had no name have one now."""
        async with self._lock:
            # What was before a message that could not be decoded may have been removed by it.
            for message in await self._source.replay(self._since) or () if self._source.replays else ():
                if message.seq >= self._since and (self._next is None or message.seq < self._next):
                    self._apply(message.payload, again=True)

    async def _take(self, item: Numbered) -> None:
        counts = self._watch.counts
        if item.seq <= self._live or self._doubt:
            counts.restarts += item.seq <= self._live
            self._begin_anew()
            if self._source.replays:
                await self._refill(0)
        self._live = item.seq
        if self._next is not None and item.seq > self._next:
            counts.gaps += item.seq - self._next
            if self._source.replays:
                await self._refill(self._next)
            if item.seq > self._next:
                self._forget(f"messages {self._next} to {item.seq - 1} are missing")
        if self._next is None or item.seq >= self._next:
            self._next = item.seq + 1
            self._apply(item.payload)

    def _begin_anew(self) -> None:
        self._doubt = False
        self._next = 0 if self._source.replays else None
        self._live = -1
        self._since = 0
        self._forget("the engine began anew")

    async def _refill(self, start: int) -> None:
        """Apply what the engine still has from `start` on; a hole in it means that all is forgotten."""
        got = await self._source.replay(start)
        if got is None:
            self._watch.alarm("replay", "it does not answer at its replay address")
            return
        self._watch.counts.replays += 1
        self._watch.settle("replay")
        for message in got:
            if self._next is not None and message.seq < self._next:
                continue
            if message.seq > (self._next or 0):
                if self._next:
                    self._forget(f"messages {self._next} to {message.seq - 1} are not kept any more")
                else:
                    log.warning(
                        "the engine of worker %s keeps no messages before %d: what they told is not known",
                        self._watch.worker,
                        message.seq,
                    )
            self._next = message.seq + 1
            self._apply(message.payload)

    def _forget(self, why: str) -> None:
        if any(map(len, self._groups)):
            self._watch.counts.lost += 1
            log.warning("worker %s: what it caches is forgotten: %s", self._watch.worker, why)
        for group in self._groups:
            group.reset()
        self._renew()

    def _failed(self, error: Exception) -> None:
        """A fault of our own: it costs what we know, not the engine."""
        log.error("worker %s: following its KV events failed", self._watch.worker, exc_info=error)
        self._unsure(short(error))
        for group in self._groups:  # it may be half done
            group.reset()

    def _unsure(self, why: str) -> None:
        """Nobody knows what the newest message said, so nothing of what was before it is sure."""
        self._watch.undecodable(why)
        self._since = self._next or 0
        if any(map(len, self._groups)):
            self._forget("a message cannot be decoded")

    def _apply(self, payload: bytes, again: bool = False) -> None:
        """Once `_next` is behind it."""
        try:
            message = decode(payload)
        except UndecodableError as error:
            if not again:
                self._unsure(str(error))
            return
        try:
            self._follow(message, again)
        except Exception as error:
            self._failed(error)

    def _follow(self, message: Message, again: bool) -> None:
        watch = self._watch
        if message.unknown:
            watch.undecodable(f"events of type {', '.join(sorted(set(message.unknown))[:NAMED])}")
            if not message.events:
                return
        if message.rank is not None and message.rank != self._rank:
            watch.counts.misplaced += 1
            watch.alarm("rank", f"events of rank {message.rank} come where those of rank {self._rank} should")
            return
        if not message.unknown and not again:
            watch.understood()
        out: list[KVEvent] = []
        for event in message.events:
            if isinstance(event, Cleared):
                for group in self._groups:
                    out += group.clear(event)
                continue
            index = event.group or 0
            if not 0 <= index < len(self._groups) or (isinstance(event, Stored) and not self._fits(event)):
                watch.counts.misplaced += 1
                watch.alarm("groups", self._misfit(event.group or 0, event))
                continue
            group = self._groups[index]
            out += group.store(event) if isinstance(event, Stored) else group.remove(event)
        watch.counts.orphans = sum(group.orphans for group in self._groups)
        watch.counts.foreign = sum(group.foreign for group in self._groups)
        if out:
            self._emit(out)

    def _fits(self, event: Stored) -> bool:
        kind = self._kinds[event.group]
        if event.kind is None:
            return True
        return kind == ("full" if "full" in event.kind or "mla" in event.kind else "window")

    def _misfit(self, index: int, event: object) -> str:
        told = f" of kind {short(event.kind)}" if isinstance(event, Stored) and event.kind else ""
        window = f", window {event.window}" if isinstance(event, Stored) and event.window else ""
        return (
            f"KV events of its group {index}{told}{window}; the deployment's engine.groups name "
            f"{', '.join(map(repr, self._kinds))}: name all groups of the engine, in its order"
        )
