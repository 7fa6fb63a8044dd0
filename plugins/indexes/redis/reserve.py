"""`Reservations` in Redis: each gateway keeps one hash, worker and rank -> microseconds that it has reserved
and not seen started. One script adds up the hashes of all gateways, and writes into its own.

- `bien:{fp}:gateways`   sorted set of gateways, scored by when they were last heard of (ms)
- `bien:{fp}:load:<id>`  hash, as above; lives while its gateway renews it
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bien.core.api import Context
from bien.gateway.api import Bid, Keys, explained, run_script
from bien.plugins.indexes.redis import RedisConfig
from bien.plugins.indexes.redis.link import Link

MEET_SECONDS = 1.0  # between looks who else is there
REST_SECONDS = 1.0  # without reservations after one that did not come in time
SEND_SECONDS = 0.02  # that what is released waits for more, or for a reservation
MOST = 16  # bids of one reservation; the dearer ones are left out
log = logging.getLogger("bien.gateway")

RESERVE = """
-- KEYS the gateway's own loads, then those of the others
-- ARGV lease ms, how many changes of its own, place and change of each; then of each request: how many bids,
--      and place, cost, wait and work of each
-- Of each request: which bid it is (from 0), and what had been reserved at the place of each
local at = 3 + 2 * ARGV[2]
for i = 3, at - 1, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
local answer = {}
while at < #ARGV do
  local places, loads, first = {}, {}, at + 1
  at = first + 4 * ARGV[at]
  for i = first, at - 1, 4 do
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
    local bid = first + 4 * i - 4
    local price = ARGV[bid + 1] + math.max(tonumber(ARGV[bid + 2]), loads[i])
    if price < lowest then best, lowest = i, price end
  end
  redis.call('HINCRBY', KEYS[1], places[best], ARGV[first + 4 * best - 1])
  answer[#answer + 1] = best - 1
  for i = 1, #loads do answer[#answer + 1] = loads[i] end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return answer
"""

MEET = """
-- KEYS gateways, the gateway's own loads
-- ARGV gateway, lease ms
-- Whether it was not there, then all gateways
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local new = redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ms - ARGV[2])
for key = 1, 2 do redis.call('PEXPIRE', KEYS[key], ARGV[2]) end
local gateways = redis.call('ZRANGE', KEYS[1], 0, -1)
table.insert(gateways, 1, new)
return gateways
"""

WRITE = """
-- KEYS the gateway's own loads
-- ARGV lease ms, place and load of each place that has one
redis.call('DEL', KEYS[1])
if #ARGV == 1 then return end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
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


@dataclass(slots=True, eq=False)
class _Asked:
    """One request that wants a reservation."""

    places: list[str]
    bids: Sequence[Bid]
    chosen: list[int]  # the bids that are sent, in this order
    answer: asyncio.Future[Reservation | None]


class Book:
    """What one gateway has reserved at workers of one fingerprint."""

    def __init__(self, keys: Keys, gateway: str, on_change: Callable[[Book], None]) -> None:
        self.gateways = keys.gateways
        self.own = keys.load(gateway)
        self.others: list[str] = []  # keys of their loads, as of the last meeting
        self.loads: dict[str, int] = {}  # by place, microseconds; none is 0
        self.changes: dict[str, int] = {}  # of what Redis holds of ours, not sent yet
        self.asked: list[_Asked] = []  # not sent yet
        self.asking = 0  # commands that reserve, on their way or about to be
        self.meet_at = 0.0
        self.wrong = False  # Redis may hold something else of ours than what is true
        self.writing = False  # it is being set right
        self.sending = False  # changes are on their way or about to be
        self._load_key = keys.load
        self._on_change = on_change

    def add(self, place: str, work: int) -> None:
        load = self.loads.get(place, 0) + work
        if load:
            self.loads[place] = load
        else:
            self.loads.pop(place, None)

    def change(self, place: str, work: int) -> None:
        self.changes[place] = self.changes.get(place, 0) + work
        self._on_change(self)

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
    """Requests that come in one turn of the event loop share one command."""

    def __init__(self, link: Link, config: RedisConfig, ctx: Context) -> None:
        self.made = 0
        self.missed = 0  # that did not come in time
        self._link = link
        self._namespace = config.namespace
        self._clock = ctx.clock
        self._lease = max(1, int(config.lease_seconds * 1000))
        self._patience = config.reserve_seconds
        self._rng = ctx.rng
        self._id = secrets.token_hex(8)
        self._books: dict[str, Book] = {}  # by fingerprint
        self._rest = 0.0  # until then there are none
        self._tasks: set[asyncio.Task[None]] = set()

    def shared(self, fp: str) -> bool:
        book = self._books.get(fp)
        if book is None or not book.others or book.writing:
            return False
        return self._link.up and self._clock.time() >= self._rest

    async def reserve(
        self, fp: str, places: Sequence[tuple[str, int]], bids: Sequence[Bid]
    ) -> Reservation | None:
        book = self._books.get(fp)
        if book is None or book.writing:
            return None
        chosen = list(range(len(bids)))
        self._rng.shuffle(chosen)  # of equal ones the script takes the first
        if len(bids) > MOST:
            chosen = sorted(chosen, key=lambda i: bids[i].cost + bids[i].wait)[:MOST]
        names = [f"{worker}/{rank}" for worker, rank in places]
        asked = _Asked(names, bids, chosen, asyncio.get_running_loop().create_future())
        if not book.asked:
            book.asking += 1  # from now on nothing is set right
            self._start(self._ask(book))
        book.asked.append(asked)
        answer = asked.answer
        try:
            await asyncio.wait((answer,), timeout=self._patience)
        except asyncio.CancelledError:
            answer.add_done_callback(_give_back)
            raise
        if answer.done():
            return answer.result()
        answer.add_done_callback(_give_back)
        self._miss()
        return None

    async def tick(self, fps: set[str]) -> None:
        """Every now and then, from one task. Raises what the link's commands raise."""
        for fp in fps:
            book = self._books.get(fp)
            if book is None:
                book = Book(Keys(self._namespace, fp), self._id, self._released)
                self._books[fp] = book
            if self._clock.time() >= book.meet_at:
                await self._meet(book)

    async def leave(self) -> None:
        """This gateway ends."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for book in self._books.values():
            await run_script(self._link.client, LEAVE, (book.gateways, book.own), self._id)

    async def _ask(self, book: Book) -> None:
        asked, book.asked = book.asked, []
        sent, book.changes = book.changes, {}
        arguments: list[str | int] = [self._lease, len(sent)]
        for change in sent.items():
            arguments += change
        for one in asked:
            arguments.append(len(one.chosen))
            for bid, place in ((one.bids[i], one.places[i]) for i in one.chosen):
                arguments += (place, _us(bid.cost), _us(bid.wait), _us(bid.work))
        try:
            answer = await run_script(self._link.client, RESERVE, (book.own, *book.others), *arguments)
        except self._link.trouble as error:
            book.meet_at, book.wrong = 0.0, True  # who knows what it has done
            self._miss()
            log.info("no reservation: %s", explained(error))
        else:
            self._take(book, asked, iter(answer))
        finally:
            book.asking -= 1
            for one in asked:
                if not one.answer.done():
                    one.answer.set_result(None)

    def _take(self, book: Book, asked: list[_Asked], answer: Iterator[int]) -> None:
        for one in asked:
            at, waits = one.chosen[next(answer)], [0.0] * len(one.bids)
            for i in one.chosen:
                waits[i] = next(answer) / 1000
            made = Reservation(book, one.places, at, waits, _us(one.bids[at].work))
            self.made += 1
            one.answer.set_result(made)

    def _miss(self) -> None:
        self.missed += 1
        self._rest = self._clock.time() + REST_SECONDS

    async def _meet(self, book: Book) -> None:
        """Say that we are here, and learn who else is."""
        answer = await run_script(self._link.client, MEET, (book.gateways, book.own), self._id, self._lease)
        book.met(answer[1:], self._id)
        book.meet_at = self._clock.time() + min(MEET_SECONDS, self._lease / 3000)
        if answer[0] or book.wrong:  # Redis did not know us: it has forgotten the rest, too
            await self._set_right(book)

    async def _set_right(self, book: Book) -> None:
        book.writing = True
        try:
            while book.asking or book.sending:
                await self._clock.sleep(0.001)
            book.wrong, book.changes = False, {}
            loads = [part for pair in book.loads.items() for part in pair]
            await run_script(self._link.client, WRITE, (book.own,), self._lease, *loads)
        except BaseException:
            book.wrong = True
            raise
        finally:
            book.writing = False

    def _released(self, book: Book) -> None:
        """Others hear of it soon, by the next reservation or without one."""
        if not book.sending:
            book.sending = True
            self._start(self._send(book))

    async def _send(self, book: Book) -> None:
        try:
            await self._clock.sleep(SEND_SECONDS)
            if book.changes and not book.writing:
                changes, book.changes = book.changes, {}
                parts = [part for change in changes.items() for part in change]
                await run_script(self._link.client, CHANGE, (book.own,), self._lease, *parts)
        except self._link.trouble:
            book.meet_at, book.wrong = 0.0, True
        finally:
            book.sending = False

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _give_back(answer: asyncio.Future[Reservation | None]) -> None:
    """Nobody wants it any more."""
    if not answer.cancelled() and (made := answer.result()) is not None:
        made.release()


def _us(ms: float) -> int:
    return max(0, int(min(ms, 1e9) * 1000))
