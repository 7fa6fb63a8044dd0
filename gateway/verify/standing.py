"""`Standing`: how far the index is believed of one worker, and why not further."""

from __future__ import annotations

import logging
from enum import IntEnum

from bien.core.worker.messages import WorkerInfo
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.tap import Tap
from bien.gateway.verify.window import Window

log = logging.getLogger("bien.verify")


class Mode(IntEnum):
    """Who says what a worker has cached."""

    PRECISE = 0  # the index
    APPROXIMATE = 1  # our own history of what was sent there
    STICKY = 2  # the session's last placement, and nothing else


CAUSES = ("hash", "block size", "template", "salt", "staleness", "eviction", "engine", "unknown")


class Standing:
    def __init__(self, info: WorkerInfo, options: VerifyOptions) -> None:
        self.info = info
        self.mode = Mode.PRECISE
        self.cause = ""  # one of CAUSES while not precise
        self.why = ""  # in words
        first = Tap(info.generation)
        self.taps = [first, *(Tap(info.generation, rank, first) for rank in range(1, info.dp_ranks))]
        self.window = Window(options)  # what the index said, whatever the mode
        self.used = Window(options)  # what was said in its place, while it is not believed
        self.counts = {"same": 0, "over": 0, "under": 0, "excused": 0}  # comparisons
        self.falls = 0
        self.changed = float("-inf")  # clock seconds of the latest change of mode
        self.looked = float("-inf")  # and of the latest end of a search for the cause
        self._options = options

    @property
    def tap(self) -> Tap:
        """Of the first rank."""
        return self.taps[0]

    @property
    def tolerance(self) -> int:
        """Tokens that claim and find may differ by: of a block, engines count ends differently."""
        return max(self.info.block_tokens, self.info.cached_in)

    @property
    def dwell(self) -> float:
        """Seconds that it stays where it is before the way back: whoever falls often waits long."""
        return min(self._options.longest, self._options.dwell * 2.0 ** (self.falls - 1))

    def change(self, mode: Mode, now: float, cause: str = "", why: str = "") -> None:
        """Said once."""
        before, self.mode = self.mode, mode
        self.falls += mode > before
        self.changed = now
        self.cause, self.why = cause, why
        self.used.clear()
        if mode > before:
            log.warning(
                "worker %s: index and cache have parted; routing to it is %s now, no longer %s",
                self.info.id,
                mode.name.lower(),
                before.name.lower(),
            )
        else:
            why = "parity is good again" if mode is Mode.PRECISE else "another try"
            log.warning("worker %s: %s: routing to it is %s", self.info.id, why, mode.name.lower())

    def explain(self, cause: str, why: str) -> None:
        if cause != self.cause:
            log.warning("worker %s: why index and cache have parted: %s: %s", self.info.id, cause, why)
        self.cause, self.why = cause, why
