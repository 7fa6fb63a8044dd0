"""`Patience`: how long a request waits for its reservation.

Where answers take longer than usual the loops of gateways are mostly busy themselves, and just then it
matters that not all go to the same worker: so a request waits as long as answers take of late, but never so
long that it could cost more than it saves.
"""

from __future__ import annotations

TRIPS = 2.0  # a request may come while a command is on its way, and waits for the next
SHARE = 0.5  # of what the request has to compute
LONGEST = 0.25  # seconds
FIRST = 0.05  # seconds that an answer may take before one is known
UP, DOWN = 1 / 2, 1 / 16  # weight of an answer that took longer than those before, or less


class Patience:
    def __init__(self, least: float) -> None:
        """`least`: seconds that every request waits, if it must."""
        self.least = least
        self.trip = FIRST  # seconds until an answer, of late

    def took(self, seconds: float) -> None:
        """An answer came, in time or not."""
        self.trip += (seconds - self.trip) * (UP if seconds > self.trip else DOWN)

    def of(self, work: float) -> float:
        """Seconds, for a request of so much work (ms)."""
        return max(self.least, min(TRIPS * self.trip, SHARE * work / 1000, LONGEST))
