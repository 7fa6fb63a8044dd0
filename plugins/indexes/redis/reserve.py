"""`Reservations` in Redis: each gateway keeps one hash, worker and rank -> microseconds that it has reserved
and not seen started. One script adds up the hashes of all gateways, and writes into its own.

- `bien:{fp}:gateways`   sorted set of gateways, scored by when they were last heard of (ms)
- `bien:{fp}:load:<id>`  hash, as above; lives while its gateway renews it
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from bien.core.api import Clock
from bien.gateway.api import Bid, Keys, explained, run_script
from bien.plugins.indexes.redis.link import Link

MEET_SECONDS = 1.0  # between looks who else is there
REST_SECONDS = 1.0  # without reservations after one that did not come in time
MOST = 16  # bids of one reservation; the dearer ones are left out
log = logging.getLogger("bien.gateway")

RESERVE = """
-- KEYS the gateway's own loads, then those of the others
-- ARGV lease ms, how many changes of its own, place and change of each, then place, cost, wait and work of
--      each bid
local first = 3 + 2 * ARGV[2]
for i = 3, first - 1, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
local places, loads = {}, {}
for i = first, #ARGV, 4 do
  places[#places + 1] = ARGV[i]
  loads[#places] = 0
end
for _, key in ipairs(KEYS) do
  for i, value in ipairs(redis.call('HMGET', key, unpack(places))) do
    if value then loads[i] = loads[i] + math.max(0, tonumber(value)) end
  end
end
local best, lowest = 0, math.huge
for i = 1, #places do
  local at = first + 4 * i - 4
  local price = ARGV[at + 1] + math.max(tonumber(ARGV[at + 2]), loads[i])
  if price < lowest then best, lowest = i, price end
end
redis.call('HINCRBY', KEYS[1], places[best], ARGV[first + 4 * best - 1])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
table.insert(loads, 1, best - 1)
return loads
"""

MEET = """
-- KEYS gateways, the gateway's own loads
-- ARGV gateway, lease ms, then place and load of each place that has one
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ms - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[2])
if #ARGV > 2 then
  redis.call('HSET', KEYS[2], unpack(ARGV, 3))
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""

CHANGE = """
-- KEYS the gateway's own loads
-- ARGV lease ms, then place and change of each
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""

LEAVE = """
-- KEYS gateways, the gateway's own loads
-- ARGV gateway
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
"""


class Book:
    """What one gateway has reserved at workers of one fingerprint."""

    def __init__(self, keys: Keys, gateway: str) -> None:
        self.gateways = keys.gateways
        self.own = keys.load(gateway)
        self.others: list[str] = []  # keys of their loads, as of the last meeting
        self.loads: dict[str, int] = {}  # by place, microseconds; none is 0
        self.changes: dict[str, int] = {}  # of what Redis holds of ours, not sent yet
        self.asking = 0  # reservations on their way
        self.meeting = False
        self.meet_at = 0.0
        self._load_key: Callable[[str], str] = keys.load

    def add(self, place: str, work: int) -> None:
        load = self.loads.get(place, 0) + work
        if load:
            self.loads[place] = load
        else:
            self.loads.pop(place, None)

    def change(self, place: str, work: int) -> None:
        self.changes[place] = self.changes.get(place, 0) + work

    def met(self, gateways: list[bytes], own: str) -> None:
        self.others = [self._load_key(g.decode()) for g in gateways if g.decode() != own]


class Reservation:
    """A `Reserved`."""

    def __init__(self, book: Book, places: list[str], at: int, waits: list[float], work: int) -> None:
        self.at = at
        self.waits = waits
        self._book = book
        self._places = places
        self._work = work
        book.add(places[at], work)

    def move(self, at: int, work: float) -> None:
        self.release()
        self.at, self._work = at, _us(work)
        self._book.add(self._places[at], self._work)
        self._book.change(self._places[at], self._work)

    def release(self) -> None:
        self._book.add(self._places[self.at], -self._work)
        self._book.change(self._places[self.at], -self._work)


class Reserver:
    def __init__(self, link: Link, namespace: str, clock: Clock, lease: float, patience: float) -> None:
        """`patience`: seconds that a request waits for its reservation."""
        self.made = 0
        self.missed = 0  # that did not come in time
        self._link = link
        self._namespace = namespace
        self._clock = clock
        self._lease = max(1, int(lease * 1000))
        self._patience = patience
        self._id = secrets.token_hex(8)
        self._books: dict[str, Book] = {}  # by fingerprint
        self._rest = 0.0  # until then there are none
        self._late: set[asyncio.Task[Reservation | None]] = set()

    def shared(self, fp: str) -> bool:
        book = self._books.get(fp)
        if book is None or not book.others or book.meeting:
            return False
        return self._link.up and self._clock.time() >= self._rest

    async def reserve(
        self, fp: str, places: Sequence[tuple[str, int]], bids: Sequence[Bid]
    ) -> Reservation | None:
        book = self._books.get(fp)
        if book is None:
            return None
        task = asyncio.create_task(self._ask(book, places, bids))
        try:
            await asyncio.wait((task,), timeout=self._patience)
        except asyncio.CancelledError:
            self._wait_for(task)
            raise
        if task.done():
            return task.result()
        self._wait_for(task)
        self.missed += 1
        self._rest = self._clock.time() + REST_SECONDS
        return None

    async def tick(self, fps: set[str]) -> None:
        """Every now and then, from one task. Raises what the link's commands raise."""
        for fp in fps:
            book = self._books.get(fp)
            if book is None:
                book = self._books[fp] = Book(Keys(self._namespace, fp), self._id)
            if self._clock.time() >= book.meet_at:
                await self._meet(book)
            elif book.changes:
                await self._send(book)

    async def leave(self) -> None:
        """This gateway ends."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        for book in self._books.values():
            await run_script(self._link.client, LEAVE, (book.gateways, book.own), self._id)

    async def _ask(
        self, book: Book, places: Sequence[tuple[str, int]], bids: Sequence[Bid]
    ) -> Reservation | None:
        chosen = list(range(len(bids)))
        if len(bids) > MOST:
            chosen = sorted(chosen, key=lambda i: bids[i].cost + bids[i].wait)[:MOST]
        names = [f"{worker}/{rank}" for worker, rank in places]
        arguments: list[str | int] = [self._lease, len(book.changes)]
        for change in book.changes.items():
            arguments += change
        sent, book.changes = book.changes, {}
        for i in chosen:
            arguments += (names[i], _us(bids[i].cost), _us(bids[i].wait), _us(bids[i].work))
        book.asking += 1
        try:
            at, *loads = await run_script(self._link.client, RESERVE, (book.own, *book.others), *arguments)
        except self._link.trouble as error:
            for change in sent.items():
                book.change(*change)
            book.meet_at = 0.0  # who knows what it has done: all is written anew
            self.missed += 1
            self._rest = self._clock.time() + REST_SECONDS
            log.info("no reservation: %s", explained(error))
            return None
        finally:
            book.asking -= 1
        self.made += 1
        waits = [0.0] * len(bids)
        for i, load in zip(chosen, loads, strict=True):
            waits[i] = load / 1000
        return Reservation(book, names, chosen[at], waits, _us(bids[chosen[at]].work))

    def _wait_for(self, task: asyncio.Task[Reservation | None]) -> None:
        """Nobody wants what it makes."""
        self._late.add(task)
        task.add_done_callback(self._came_late)

    def _came_late(self, task: asyncio.Task[Reservation | None]) -> None:
        self._late.discard(task)
        if not task.cancelled() and task.exception() is None and (made := task.result()) is not None:
            made.release()

    async def _meet(self, book: Book) -> None:
        """Say that we are here, learn who else is, and set what Redis holds of ours to what is true."""
        book.meeting = True
        try:
            while book.asking:
                await self._clock.sleep(0.001)
            book.changes = {}
            loads = [part for pair in book.loads.items() for part in pair]
            answer = await run_script(
                self._link.client, MEET, (book.gateways, book.own), self._id, self._lease, *loads
            )
            book.met(answer, self._id)
            book.meet_at = self._clock.time() + min(MEET_SECONDS, self._lease / 3000)
        finally:
            book.meeting = False

    async def _send(self, book: Book) -> None:
        changes, book.changes = book.changes, {}
        try:
            parts = [part for change in changes.items() for part in change]
            await run_script(self._link.client, CHANGE, (book.own,), self._lease, *parts)
        except self._link.trouble:
            book.meet_at = 0.0
            raise


def _us(ms: float) -> int:
    return max(0, int(min(ms, 1e9) * 1000))
