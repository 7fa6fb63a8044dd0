"""`Book`: what one gateway has reserved, as it stands here and as Redis has been told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bien.gateway.api import Bid, Keys

CHANCE = 0.02  # that another gateway has just sent a request like this where this one is to go
WORTH = 1.0  # ms that asking must be likely to save: about a round trip; prices that differ by less are equal
SEEN = 64  # reservations that are remembered for what they found
GUESSES = 16  # choices that were close and not asked for, after which one is
QUIET_SECONDS = 0.05  # that one nobody was asked for must last before others are told of it
SLACK = 5.0  # ms x s by which others may be wrong before they are told of changes


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
    """What one gateway has reserved at workers of one fingerprint. It is written by `Reserver` and by the
    reservations themselves."""

    def __init__(
        self, keys: Keys, gateway: str, clock: Callable[[], float], on_change: Callable[[Book], None]
    ) -> None:
        self.gateways = keys.gateways
        self.own = keys.load(gateway)
        self.others: list[str] = []  # keys of their loads, as of the last meeting
        self.loads: dict[str, int] = {}  # by place, microseconds; none is 0
        self.changes: dict[str, int] = {}  # of what Redis holds of ours, not sent yet; none is 0
        self.asked: list[Asked] = []  # not sent yet
        self.asking = 0  # commands that reserve, on their way or about to be
        self.meet_at = 0.0
        self.wrong = False  # Redis may hold something else of ours than what is true
        self.writing = False  # it is being set right
        self.sending = False  # changes are on their way
        self.telling = False  # a task looks after changes
        self._seen: deque[float] = deque(maxlen=SEEN)  # ms reserved at the best place beyond the known wait
        self._guessed = 0  # close choices since one was asked for
        self._quiet: deque[tuple[float, Reservation]] = deque()  # that others do not know of; since when
        self._since = 0.0  # of the changes
        self._load_key = keys.load
        self._clock = clock
        self._on_change = on_change

    # Whether to ask.

    def reach(self, work: float) -> float:
        """Ms: others have at most about so much at a place that we do not know of."""
        return WORTH + max(max(self._seen, default=0.0), len(self.others) * work)

    def worth_asking(self, gap: float, work: float) -> bool:
        """Of a request of so much work whose best place is so much cheaper than the next. What others have
        there beyond `gap` is what asking saves: as often as lately seen, or with a small chance a request like
        this from each of them."""
        likely = len(self.others) * CHANCE * max(0.0, work - gap)
        if self._seen:
            likely = max(likely, sum(h - gap for h in self._seen if h > gap) / len(self._seen))
        self._guessed += 1
        if likely < WORTH and self._guessed < GUESSES:
            return False
        self._guessed = 0
        return True

    def seen(self, hidden: float) -> None:
        self._seen.append(max(0.0, hidden))

    # What is held.

    def take(self, places: list[str], at: int, work: int) -> Reservation:
        """One that Redis was not asked for, and is told of if it lasts."""
        made = Reservation(self, places, at, [0.0] * len(places), work, told=False)
        self._quiet.append((self._clock(), made))
        self._on_change(self)
        return made

    def add(self, place: str, work: int) -> None:
        _add(self.loads, place, work)

    def change(self, place: str, work: int) -> None:
        if not self.changes:
            self._since = self._clock()
        _add(self.changes, place, work)
        self._on_change(self)

    def met(self, gateways: Iterable[bytes], own: str) -> None:
        self.others = [self._load_key(g.decode()) for g in gateways if g.decode() != own]

    @property
    def untold(self) -> bool:
        """Whether there is anything that others may have to hear."""
        return bool(self.changes or self._quiet)

    def due(self) -> bool:
        """Whether it is time to tell others of changes: what they are wrong about counts with how much, and
        for how long. Those that ended before others had to know were never there."""
        now = self._clock()
        while self._quiet and (self._quiet[0][1].over or now - self._quiet[0][0] >= QUIET_SECONDS):
            self._quiet.popleft()[1].tell()
        return sum(map(abs, self.changes.values())) / 1000 * (now - self._since) >= SLACK

    def rewritten(self) -> None:
        """Redis is given `loads` as they stand."""
        self.wrong, self.changes = False, {}
        while self._quiet:
            self._quiet.popleft()[1].told = True


class Reservation:
    """A `Reserved`. `told`: Redis knows of it."""

    def __init__(
        self, book: Book, places: list[str], at: int, waits: list[float], work: int, told: bool = True
    ) -> None:
        self.at = at
        self.waits = waits
        self.told = told
        self.over = False
        self._book = book
        self._places = places
        self._work = work
        book.add(places[at], work)

    def move(self, at: int, work: float) -> None:
        self._change(-self._work)
        self.at, self._work = at, us(work)
        self._change(self._work)

    def release(self) -> None:
        self.over = True
        self._change(-self._work)

    def tell(self) -> None:
        if not self.over and not self.told:
            self.told = True
            self._book.change(self._places[self.at], self._work)

    def _change(self, work: int) -> None:
        self._book.add(self._places[self.at], work)
        if self.told:
            self._book.change(self._places[self.at], work)


def us(ms: float) -> int:
    return max(0, int(min(ms, 1e9) * 1000))


def _add(to: dict[str, int], place: str, work: int) -> None:
    if load := to.get(place, 0) + work:
        to[place] = load
    else:
        to.pop(place, None)
