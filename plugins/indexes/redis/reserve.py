"""`Reservations` in Redis: each gateway keeps one hash, worker and rank -> microseconds that it has reserved
and not seen started. One script adds up the hashes of all gateways, and writes into its own.

- `bien:{fp}:gateways`   sorted set of gateways, scored by when they were last heard of (ms)
- `bien:{fp}:load:<id>`  hash, as above; lives while its gateway renews it
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from bien.core.api import Context
from bien.gateway.api import Bid, Keys, explained, run_script
from bien.plugins.indexes.redis import RedisConfig
from bien.plugins.indexes.redis.book import Asked, Book, Reservation, us
from bien.plugins.indexes.redis.link import Link
from bien.plugins.indexes.redis.reserve_scripts import CHANGE, LEAVE, MEET, RESERVE, WRITE

MEET_SECONDS = 1.0  # between looks who else is there
REST, LONGEST_REST = 0.1, 2.0  # seconds without reservations after one that did not come in time
SEND_SECONDS = 0.05  # that what is released waits for more, or for a reservation
NEAR = 1.0  # ms by which prices differ that are as good as equal
MOST = 8  # bids of one reservation; the dearer ones are left out
log = logging.getLogger("bien.gateway")


class Reserver:
    """Requests that come in one turn of the event loop share one command. Where one target is so much cheaper
    that nothing others may have reserved changes it, nobody waits: they are told a little later."""

    def __init__(self, link: Link, config: RedisConfig, ctx: Context) -> None:
        self.made = 0
        self.asked = 0  # of these: Redis chose
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
        self._pause = REST  # of the next one
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
        names = [f"{worker}/{rank}" for worker, rank in places]
        chosen = self._open(book, bids)
        if len(chosen) == 1:
            self.made += 1
            return book.take(names, chosen[0], us(bids[chosen[0]].work))
        asked = Asked(names, bids, chosen, asyncio.get_running_loop().create_future())
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

    def _open(self, book: Book, bids: Sequence[Bid]) -> list[int]:
        """The bids that may turn out to be the cheapest: the cheapest could reach their price by what was
        lately seen reserved beyond what we knew, or by a request like this from every other gateway."""
        prices = [bid.cost + bid.wait for bid in bids]
        best = min(range(len(bids)), key=prices.__getitem__)
        most = prices[best] + NEAR + max(book.hidden, len(book.others) * bids[best].work)
        chosen = [i for i, price in enumerate(prices) if price <= most]
        self._rng.shuffle(chosen)  # of equal ones the script takes the first
        return sorted(chosen, key=prices.__getitem__)[:MOST] if len(chosen) > MOST else chosen

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
                arguments += (place, us(bid.cost), us(bid.wait), us(bid.work))
        try:
            answer = await run_script(self._link.client, RESERVE, (book.own, *book.others), *arguments)
        except self._link.trouble as error:
            book.meet_at, book.wrong = 0.0, True  # who knows what it has done
            self._miss()
            log.info("no reservation: %s", explained(error))
        else:
            if self._clock.time() >= self._rest:
                self._pause = REST
            self._take(book, asked, iter(answer))
        finally:
            book.asking -= 1
            for one in asked:
                if not one.answer.done():
                    one.answer.set_result(None)

    def _take(self, book: Book, asked: list[Asked], answer: Iterator[int]) -> None:
        for one in asked:
            at, waits = one.chosen[next(answer)], [0.0] * len(one.bids)
            for i in one.chosen:
                waits[i] = next(answer) / 1000
            book.seen(max(waits[i] - one.bids[i].wait for i in one.chosen))
            made = Reservation(book, one.places, at, waits, us(one.bids[at].work))
            self.made += 1
            self.asked += 1
            one.answer.set_result(made)

    def _miss(self) -> None:
        self.missed += 1
        now = self._clock.time()
        if now >= self._rest:  # others may have missed the same answer
            self._rest = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_REST)

    async def _meet(self, book: Book) -> None:
        """Say that we are here, and learn who else is."""
        keys = (book.gateways, book.own)
        new, *gateways = await run_script(self._link.client, MEET, keys, self._id, self._lease)
        book.met(gateways, self._id)
        book.meet_at = self._clock.time() + min(MEET_SECONDS, self._lease / 3000)
        if new or book.wrong:  # Redis did not know us: it has forgotten the rest, too
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
                parts = [part for change in changes.items() if change[1] for part in change]
                if not parts:
                    return
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
