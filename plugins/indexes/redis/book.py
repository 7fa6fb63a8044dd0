"""`Book`: what one gateway has reserved, as it stands here and as Redis has been told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bien.gateway.api import Bid, Keys

CHANCE = 0.02  # that another gateway has just sent a request like this where this one is to go
GUESS = 8  # reservations seen that weigh as much as that guess
WORTH = 1.0  # ms that asking must be likely to save: about a round trip; prices that differ by less are equal
SEEN = 64  # reservations that are remembered for what they found
PASSED = 16  # choices that were close and not asked for, after which one is
CROWDED = 0.25
SURE = 0.01  # seconds that the server's clock may be wrong
UNSURE = 600_000_000  # microseconds for which what Redis may hold is set right once more
WRONG = 60_000  # microseconds by which others may be wrong about a place


@dataclass(slots=True)
class Asked:
    """One request that wants a reservation."""

    places: list[str]
    bids: Sequence[Bid]
    chosen: list[int]  # the bids that may win, equals in random order
    answer: asyncio.Future[Reservation | None]

    def best(self, reserved: Callable[[str], int]) -> tuple[int, float]:
        """The bid with the lowest price and that, given what is reserved at a place (microseconds)."""
        prices = [(self.price(i, reserved(self.places[i])), n) for n, i in enumerate(self.chosen)]
        price, n = min(prices)
        return self.chosen[n], price

    def price(self, bid: int, reserved: int) -> float:
        return self.bids[bid].cost + max(self.bids[bid].wait, reserved / 1000)


class Book:
    """What one gateway has reserved at workers of one fingerprint. Of a place that is the time when all of it
    will have started, as predicted; so it ends by itself. Times are the server's, in microseconds."""

    def __init__(self, keys: Keys, gateway: str, clock: Callable[[], float]) -> None:
        self.gateways = keys.gateways
        self.own = keys.load(gateway)
        self.others: list[str] = []  # keys of theirs, as of the last meeting
        self.loads: dict[
            str, int
        ] = {}  # by place, microseconds: of reservations that are not over; none is 0
        self.until: dict[str, int] = {}  # by place: the time; gone when it is past and nothing is reserved
        self.told: dict[str, int] = {}  # the same as Redis holds it
        self.asked: list[Asked] = []  # not sent yet
        self.busy = False  # a command of ours is on its way: the next waits, so that none overtakes it
        self.telling = False  # a task looks after what others are wrong about
        self.meet_at = 0.0
        self._seen: deque[float] = deque(maxlen=SEEN)  # ms reserved at the best place beyond the known wait
        self._clashes = 0.0  # share of those asked for that met another, of late
        self._passed = 0  # close choices since one was asked for
        self._behind: int | None = None  # microseconds that the server's clock is behind ours
        self._load_key = keys.load
        self._clock = clock

    @property
    def now(self) -> int:
        return int(self._clock() * 1e6) - (self._behind or 0)

    # Whether to ask.

    def reach(self, work: float) -> float:
        """Ms: others have at most about so much at a place that we do not know of."""
        return WORTH + max(max(self._seen, default=0.0), len(self.others) * work)

    def worth_asking(self, gap: float, work: float) -> bool:
        """Of a request of so much work whose best place is so much cheaper than the next. What others have
        there beyond `gap` is what asking saves: as often as lately seen; while little was seen, there may be
        with a small chance a request like this from each of them. Who is always first sees nothing, and must
        be seen: a part of that chance stays."""
        guess = len(self.others) * CHANCE * max(0.0, work - gap)
        likely = (GUESS * guess + sum(h - gap for h in self._seen if h > gap)) / (GUESS + len(self._seen))
        likely = max(likely, guess / 3)
        self._passed += 1
        if likely < WORTH and self._passed < PASSED:
            return False
        self._passed = 0
        return True

    def seen(self, one: Asked, pick: int, reserved: Callable[[str], int]) -> bool:
        """What was reserved by all when one of ours was to be at `pick`. Whether another place is better."""
        there = reserved(one.places[pick])
        others = (there - self.reserved(one.places[pick])) / 1000
        self._seen.append(max(0.0, others - one.bids[pick].wait))
        clash = one.price(pick, there) > one.best(reserved)[1] + WORTH
        self._clashes += (clash - self._clashes) / 8
        return clash

    @property
    def crowded(self) -> bool:
        """Whether others are there first so often that the script, with one trip for all, is cheaper."""
        return self._clashes > CROWDED

    # What is held.

    def reserved(self, place: str) -> int:
        return max(0, self.until.get(place, 0) - self.now)

    def add(self, place: str, work: int) -> int:
        """Until when that is."""
        self.loads[place] = self.loads.get(place, 0) + work
        until = self.until[place] = max(self.now, self.until.get(place, 0)) + work
        return until

    def remove(self, place: str, work: int) -> None:
        left = self.loads[place] = self.loads[place] - work
        self.until[place] = min(self.until.get(place, 0), self.now + left)
        if not left:
            del self.loads[place], self.until[place]

    @property
    def quiet(self) -> bool:
        """Whether nothing is left that others may have to be told."""
        if self.loads:
            return False
        now = self.now
        return all(until - now <= WRONG for until in self.told.values())

    def untold(self) -> dict[str, int]:
        """Places of which others are wrong, and the truth."""
        now, found = self.now, {}
        for place in self.until.keys() | self.told.keys():
            until, told = self.until.get(place, 0), self.told.get(place, 0)
            if abs(max(now, until) - max(now, told)) > WRONG:
                found[place] = until
        return found

    def unsure(self, places: Iterable[str]) -> None:
        """A command has failed that wrote there, or has not: all that Redis may hold is written again."""
        till = self.now + UNSURE
        self.told = dict.fromkeys([*self.told, *places], till)

    # Meetings.

    def met(self, gateways: Iterable[bytes], own: str, forgotten: bool) -> None:
        """With others at the server. `forgotten`: it did not know us."""
        self.others = [self._load_key(g.decode()) for g in gateways if g.decode() != own]
        if forgotten:
            self.told = {}

    def set_clock(self, theirs: int, began: float) -> None:
        """The server's time as it has answered to what was asked at `began`."""
        trip = self._clock() - began
        behind = int((began + trip / 2) * 1e6) - theirs
        if self._behind is not None and (trip > SURE or abs(behind - self._behind) < SURE * 1e6):
            return
        shift = (self._behind or 0) - behind  # another server, or its clock was set
        self.until = {place: until + shift for place, until in self.until.items()}
        self._behind = behind  # what Redis has been told stays what it was

    def past(self) -> list[str]:
        """Places of which Redis holds nothing that matters."""
        now = self.now
        return [place for place, told in self.told.items() if told < now and place not in self.until][:1000]


class Reservation:
    """A `Reserved`."""

    def __init__(self, book: Book, places: list[str], at: int, waits: list[float], work: int) -> None:
        self.at = at
        self.waits = waits
        self._book = book
        self._places = places
        self._work = work

    def move(self, at: int, work: float) -> None:
        self.release()
        self.at, self._work = at, us(work)
        self._book.add(self._places[at], self._work)

    def release(self) -> None:
        self._book.remove(self._places[self.at], self._work)


def us(ms: float) -> int:
    """At least 1: what is held is never nothing."""
    return max(1, int(min(ms, 1e9) * 1000))
