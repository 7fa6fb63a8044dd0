"""`Book`: what one gateway has reserved, as it stands here and as Redis has been told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bien.gateway.api import Bid, Keys

FADE = 0.9  # of what was seen, at each look


@dataclass(slots=True, eq=False)
class Asked:
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
        self.asked: list[Asked] = []  # not sent yet
        self.hidden = 0.0  # ms: the most that was lately seen reserved at a place beyond the known wait there
        self.asking = 0  # commands that reserve, on their way or about to be
        self.meet_at = 0.0
        self.wrong = False  # Redis may hold something else of ours than what is true
        self.writing = False  # it is being set right
        self.sending = False  # changes are on their way or about to be
        self._load_key = keys.load
        self._on_change = on_change

    def take(self, places: list[str], at: int, work: int) -> Reservation:
        """One that Redis has not been asked for, and is told of."""
        self.change(places[at], work)
        return Reservation(self, places, at, [0.0] * len(places), work)

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
        self.hidden *= FADE

    def seen(self, hidden: float) -> None:
        self.hidden = max(hidden, FADE * self.hidden)


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
        self.at, self._work = at, us(work)
        self._book.add(self._places[at], self._work)
        self._book.change(self._places[at], self._work)

    def release(self) -> None:
        self._book.add(self._places[self.at], -self._work)
        self._book.change(self._places[self.at], -self._work)


def us(ms: float) -> int:
    return max(0, int(min(ms, 1e9) * 1000))
