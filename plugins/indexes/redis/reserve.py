"""`Reservations` in Redis: each gateway keeps one hash, worker and rank -> when all that it has reserved
there will have started, as predicted, in microseconds of the server's clock. What is past counts for nothing.

A gateway writes its choice into its own hash and reads those of the others, in one pipeline of plain
commands, which a server runs in one go. Whoever so finds that another was there first, or that two see each
other, goes to a script, which adds up all hashes and takes the cheapest in one step.

- `bien:{fp}:reserving`  sorted set of gateways, scored by when they were last heard of (ms)
- `bien:{fp}:reserved:<id>`  hash, as above; lives while its gateway renews it
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

from bien.core.api import Context
from bien.gateway.api import Bid, Keys, ask, explained, run_script
from bien.plugins.indexes.redis import RedisConfig
from bien.plugins.indexes.redis.book import Asked, Book, Reservation, us
from bien.plugins.indexes.redis.link import Link
from bien.plugins.indexes.redis.patience import Patience
from bien.plugins.indexes.redis.reserve_scripts import LEAVE, MEET, RESERVE

MEET_SECONDS = 2.0  # between looks who else is there
REST, LONGEST_REST = 0.1, 2.0  # seconds without reservations after one that did not come in time
TELL_SECONDS = 0.05  # between looks whether others are wrong about what is reserved
MOST = 8  # bids of one reservation; the dearer ones are left out
log = logging.getLogger("bien.gateway")


class Reserver:
    """Requests that come while a command is on its way share the next one. Where one target is so much
    cheaper that what others may have reserved is unlikely to change it, nobody waits: if that reservation
    lasts, others are told a little later."""

    def __init__(self, link: Link, config: RedisConfig, ctx: Context) -> None:
        self.made = 0
        self.asked = 0  # of these: Redis was asked
        self.contested = 0  # of these: another gateway was there first
        self.missed = 0  # that did not come in time
        self._link = link
        self._namespace = config.namespace
        self._clock = ctx.clock
        self._lease = max(1, int(config.lease_seconds * 1000))
        self.patience = Patience(config.reserve_seconds)
        self._rng = ctx.rng
        self._id = secrets.token_hex(8)
        self._books: dict[str, Book] = {}  # by fingerprint
        self._rest = 0.0  # until then there are none
        self._pause = REST  # of the next one
        self._tasks: set[asyncio.Task[None]] = set()

    def shared(self, fp: str) -> bool:
        book = self._books.get(fp)
        if book is None or not book.others:
            return False
        return self._link.up and self._clock.time() >= self._rest

    async def reserve(
        self, fp: str, places: Sequence[tuple[str, int]], bids: Sequence[Bid]
    ) -> Reservation | None:
        book = self._books.get(fp)
        if book is None:
            return None
        names = [f"{worker}/{rank}" for worker, rank in places]
        chosen = self._open(book, bids)
        if len(chosen) == 1:
            self.made += 1
            return self._make(book, names, chosen[0], [0.0] * len(bids), us(bids[chosen[0]].work))
        asked = Asked(names, bids, chosen, asyncio.get_running_loop().create_future())
        book.asked.append(asked)
        if not book.busy:
            book.busy = True
            self._start(self._ask(book))
        answer, began = asked.answer, self._clock.time()
        answer.add_done_callback(lambda done: self._took(done, began))
        try:
            await asyncio.wait((answer,), timeout=self.patience.of(max(bids[i].work for i in chosen)))
        except asyncio.CancelledError:
            answer.add_done_callback(_give_back)
            raise
        if answer.done():
            return answer.result()
        answer.add_done_callback(_give_back)
        self._miss()
        return None

    def _open(self, book: Book, bids: Sequence[Bid]) -> list[int]:
        """The bids that may turn out to be the cheapest; one, where asking is not worth it."""
        prices = [bid.cost + bid.wait for bid in bids]
        order = list(range(len(bids)))
        self._rng.shuffle(order)  # of equal ones the first is taken
        best = min(order, key=prices.__getitem__)
        most = prices[best] + book.reach(bids[best].work)
        chosen = [i for i in order if prices[i] <= most]
        if len(chosen) == 1:
            return chosen
        gap = min(prices[i] for i in chosen if i != best) - prices[best]
        if not book.worth_asking(gap, bids[best].work):
            return [best]
        return sorted(chosen, key=prices.__getitem__)[:MOST] if len(chosen) > MOST else chosen

    async def tick(self, fps: set[str]) -> None:
        """Every now and then, from one task. Raises what the link's commands raise."""
        for fp in fps:
            book = self._books.get(fp)
            if book is None:
                book = self._books[fp] = Book(Keys(self._namespace, fp), self._id, self._clock.time)
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
        asked: list[Asked] = []
        try:
            while book.asked:
                asked, book.asked = book.asked, []
                if book.crowded:
                    await self._choose(book, asked, book.untold(), first=True)
                    continue
                picks, others = await self._put(book, asked)
                if late := self._keep(book, asked, picks, others):
                    places = [one.places[pick] for one, pick in late]
                    taken = {place: book.until.get(place, 0) for place in places}  # back
                    await self._choose(book, [one for one, _ in late], taken, first=False)
                if self._clock.time() >= self._rest:
                    self._pause = REST
        except self._link.trouble as error:
            book.meet_at = 0.0
            book.unsure(one.places[i] for one in asked for i in one.chosen)
            self._miss()
            log.info("no reservation: %s", explained(error))
        finally:
            book.busy = False
            left, book.asked = book.asked, []
            for one in (*asked, *left):
                if not one.answer.done():
                    one.answer.set_result(None)

    async def _put(self, book: Book, asked: list[Asked]) -> tuple[list[int], dict[str, int]]:
        """Reserve the best of each, whatever others have: the picks, and what that is at all places."""
        sent, picks = book.untold(), []
        until = dict(book.until)
        for one in asked:
            now = book.now
            pick, _ = one.best(lambda place, now=now: max(0, until.get(place, 0) - now))  # type: ignore[misc]
            place = one.places[pick]
            sent[place] = until[place] = max(now, until.get(place, 0)) + us(one.bids[pick].work)
            picks.append(pick)
        places = list(dict.fromkeys(one.places[i] for one in asked for i in one.chosen))
        pipe: Any = self._link.client.pipeline(transaction=False)
        self._write(pipe, book, sent)
        for other in book.others:
            pipe.hmget(other, places)
        _, _, *found = await ask(pipe.execute())
        now = book.now
        reserved = [sum(max(0, int(of[n] or 0) - now) for of in found) for n in range(len(places))]
        return picks, dict(zip(places, reserved, strict=True))

    def _write(self, pipe: Any, book: Book, sent: dict[str, int]) -> None:
        book.told.update(sent)
        pipe.hset(book.own, mapping=sent)
        pipe.pexpire(book.own, self._lease)

    def _keep(
        self, book: Book, asked: list[Asked], picks: list[int], others: dict[str, int]
    ) -> list[tuple[Asked, int]]:
        """Those that turn out well are made. The rest, with their picks."""
        late = []
        for one, pick in zip(asked, picks, strict=True):
            reserved = {
                place: others[place] + book.reserved(place)
                for place in map(one.places.__getitem__, one.chosen)
            }
            if book.seen(one, pick, reserved.__getitem__):
                late.append((one, pick))
                continue
            waits = [0.0] * len(one.bids)
            for i in one.chosen:
                waits[i] = reserved[one.places[i]] / 1000
            self._answer(book, one, pick, waits)
        return late

    async def _choose(self, book: Book, asked: list[Asked], right: dict[str, int], first: bool) -> None:
        """Let the script do it, after it has set right what Redis holds of ours."""
        book.told.update(right)
        arguments: list[str | int] = [self._lease, len(right)]
        arguments += [part for pair in right.items() for part in pair]
        for one in asked:
            arguments.append(len(one.chosen))
            for bid, place in ((one.bids[i], one.places[i]) for i in one.chosen):
                arguments += (place, us(bid.cost), us(bid.wait), us(bid.work))
        answer = iter(await run_script(self._link.client, RESERVE, (book.own, *book.others), *arguments))
        for one in asked:
            at, waits = one.chosen[next(answer)], [0.0] * len(one.bids)
            book.told[one.places[at]] = next(answer)
            found = {one.places[i]: next(answer) for i in one.chosen}
            for i in one.chosen:
                waits[i] = found[one.places[i]] / 1000
            clash = first and book.seen(one, one.best(book.reserved)[0], found.__getitem__)
            self.contested += clash or not first
            self._answer(book, one, at, waits)

    def _answer(self, book: Book, one: Asked, at: int, waits: list[float]) -> None:
        self.made += 1
        self.asked += 1
        one.answer.set_result(self._make(book, one.places, at, waits, us(one.bids[at].work)))

    def _make(self, book: Book, places: list[str], at: int, waits: list[float], work: int) -> Reservation:
        book.add(places[at], work)
        if not book.telling:
            book.telling = True
            self._start(self._tell(book))
        return Reservation(book, places, at, waits, work)

    def _took(self, answer: asyncio.Future[Reservation | None], began: float) -> None:
        if not answer.cancelled() and answer.result() is not None:
            self.patience.took(self._clock.time() - began)

    def _miss(self) -> None:
        self.missed += 1
        now = self._clock.time()
        if now >= self._rest:  # others may have missed the same answer
            self._rest = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_REST)

    async def _meet(self, book: Book) -> None:
        """Say that we are here, and learn who else is."""
        keys, past, began = (book.gateways, book.own), [] if book.busy else book.past(), self._clock.time()
        book.busy = book.busy or bool(past)  # else what is reserved meanwhile might be removed with it
        try:
            arguments = (self._id, self._lease, *past)
            new, theirs, *gateways = await run_script(self._link.client, MEET, keys, *arguments)
            for place in past:
                book.told.pop(place, None)
        finally:
            if past:
                self._free(book)
        book.met(gateways, self._id, bool(new))
        book.set_clock(theirs, began)
        book.meet_at = self._clock.time() + min(MEET_SECONDS, self._lease / 3000)

    async def _tell(self, book: Book) -> None:
        """While there are reservations, what others know of them is kept right."""
        try:
            while not book.quiet:
                await self._clock.sleep(TELL_SECONDS)
                if book.busy or not (sent := book.untold()) or not book.others:
                    continue
                book.busy = True
                pipe: Any = self._link.client.pipeline(transaction=False)
                self._write(pipe, book, sent)
                await ask(pipe.execute())
                self._free(book)
        except self._link.trouble:
            book.meet_at = 0.0
            book.unsure(())
            self._free(book)
        finally:
            book.telling = False

    def _free(self, book: Book) -> None:
        """Our command has come back; who waits for the next one goes on."""
        book.busy = bool(book.asked)
        if book.busy:
            self._start(self._ask(book))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _give_back(answer: asyncio.Future[Reservation | None]) -> None:
    """Nobody wants it any more."""
    if not answer.cancelled() and (made := answer.result()) is not None:
        made.release()
