"""How a trace is replayed: what a result's card says of the load."""

from __future__ import annotations

import math

import msgspec

from bien.core.errors import UserError
from bien.traces.scale import scale_exponent

MOST_LANES = 100_000
SLOWEST = 1000.0  # times as recorded
MOST_SESSIONS = 1 << 31
SEEDS = 1 << 63


class ReplayOptions(msgspec.Struct, frozen=True):
    """`concurrency` counts session trees; each lane takes the next session when its tree has ended.
    `open_loop`: sessions start at the times of the trace instead, `time_scale` applied to them too; None:
    if it has any (`Survey.settled`)."""

    concurrency: int = 4
    token_scale: float = 1.0
    time_scale: float = 1.0
    gap_cap: float | None = None  # seconds, after scaling; None: as recorded
    sessions: int | None = None  # None: all
    seed: int = 0
    open_loop: bool | None = False
    # The first session of each lane starts at this part of its turns (uniform between the two), after a
    # request that puts the prompt before that into the cache; None: at its first turn.
    advance: tuple[float, float] | None = None
    duration: float | None = None  # seconds after which turns in flight are cut off; None: to the end

    def check(self) -> ReplayOptions:
        """UserError naming the option that is out of range."""
        if not 1 <= self.concurrency <= MOST_LANES:
            raise UserError(f"--concurrency is {self.concurrency}; valid: 1 to {MOST_LANES}")
        if not 0 <= self.time_scale <= SLOWEST:  # written so that NaN is refused
            raise UserError(f"--time-scale is {self.time_scale:g}; valid: 0 (no gaps) to {SLOWEST:g}")
        if self.gap_cap is not None and not 0 <= self.gap_cap < math.inf:
            raise UserError(f"--gap-cap is {self.gap_cap:g}; valid: 0 seconds or more")
        if self.sessions is not None and not 1 <= self.sessions <= MOST_SESSIONS:
            raise UserError(f"--sessions is {self.sessions}; valid: 1 to {MOST_SESSIONS}")
        if not -SEEDS <= self.seed < SEEDS:
            raise UserError(f"--seed is {self.seed}; valid: a 64-bit integer")
        if self.advance is not None and not 0 <= self.advance[0] <= self.advance[1] <= 1:
            raise UserError(f"advance is {self.advance}; valid: two parts of a session, 0 to 1")
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise UserError(f"duration is {self.duration:g}; valid: seconds above 0")
        scale_exponent(self.token_scale)
        return self

    @property
    def exponent(self) -> int:
        """k of the token scale 1/2^k."""
        return scale_exponent(self.token_scale)

    def gap(self, recorded: float) -> float:
        """Seconds to wait for a recorded gap."""
        scaled = recorded * self.time_scale
        return scaled if self.gap_cap is None else min(scaled, self.gap_cap)


def fraction(text: str, option: str) -> float:
    """A number, or a fraction like 1/32. UserError naming `option`."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise UserError(f"{option} is {text!r}; valid: a number or a fraction like 1/32") from None
