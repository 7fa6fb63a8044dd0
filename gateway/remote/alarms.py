"""`EventWatch`: what is counted of one engine's KV events, and what is wrong with them for long.

Routing goes on whatever happens to events, only blindly: without alarms nobody would notice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from bien.core.clock import Clock

log = logging.getLogger("bien.remote")


@dataclass(slots=True)
class EventCounts:
    """Since the connection was made."""

    messages: int = 0  # understood
    undecodable: int = 0  # messages that are none of the known forms, and events of unknown types
    gaps: int = 0  # messages missing in the sequence
    restarts: int = 0  # sequences that began again: an engine with an empty cache
    replays: int = 0  # asked for, and answered
    lost: int = 0  # times that all was forgotten, because what was missed is not to be had
    misplaced: int = 0  # of another rank, or of a KV group that the deployment does not name
    orphans: int = 0  # blocks whose parent is not known
    foreign: int = 0  # blocks with an adapter, images or a salt of others


@dataclass(slots=True)
class EventWatch:
    """Written by the follower of the events and by the client of the same engine."""

    worker: str
    clock: Clock
    grace: float  # seconds
    counts: EventCounts = field(default_factory=EventCounts)
    alarms: dict[str, str] = field(default_factory=dict)  # cause -> what is wrong, in words
    _bad: float | None = None  # since when such comes again and again as cannot be decoded
    _newest: float = 0.0  # when the newest of it came
    _well: bool = True  # whether something else has come since
    _why: str = ""
    _owed: float | None = None  # since when a request is over that must have left blocks

    def understood(self) -> None:
        self.counts.messages += 1
        self._owed = None
        self._well = True
        self._forgive()
        self.settle("silent")

    def undecodable(self, why: str) -> None:
        """Counted at once, an alarm once nothing else has come for the grace period, or it has come again and
        again for as long. Never raises."""
        self.counts.undecodable += 1
        self._owed = None
        self._newest, self._well = self.clock.time(), False
        if self._bad is None:
            self._bad, self._why = self._newest, why
            log.warning("worker %s: a KV event cannot be decoded: %s", self.worker, why)

    def owed(self) -> None:
        """A request was computed there: its blocks must be told of."""
        if self._owed is None and not self.alarms.get("silent"):
            self._owed = self.clock.time()

    def check(self) -> None:
        """Raise what is due; called now and then."""
        now = self.clock.time()
        self._forgive()
        since = self._bad
        if since is not None and (self._newest if self._well else now) - since >= self.grace:
            self.alarm(
                "undecodable",
                f"{self.counts.undecodable} KV events of it cannot be decoded, the first of the latest "
                f"because: {self._why}; its cache is not known to the router",
            )
        if self._owed is not None and now - self._owed >= self.grace:
            self.alarm(
                "silent",
                f"it has computed prompts and sent no KV event for {self.grace:g} s; are events enabled "
                "there (--kv-events-config), and is this the right address, topic and rank?",
            )

    def _forgive(self) -> None:
        if self._bad is not None and self._well and self.clock.time() - self._newest >= self.grace:
            self._bad = None
            self.settle("undecodable")

    def alarm(self, cause: str, text: str) -> None:
        if cause not in self.alarms:
            log.error("worker %s: %s", self.worker, text)
        self.alarms[cause] = text

    def settle(self, cause: str) -> None:
        if self.alarms.pop(cause, None) is not None:
            log.warning("worker %s: its KV events are well again (%s)", self.worker, cause)
