"""How the index is verified."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Of a verifier that watches a gateway. Shares are of one worker's comparisons (window.py)."""

    canary: bool = True  # probe each worker when it joins
    probe: bool = True  # probe a worker whose parity is bad, for the cause
    fall: float = 0.25  # share of comparisons that differ at which an index is not believed any more
    recover: float = 0.05  # and at which it is again
    tokens: float = 0.1  # share of tokens that must be wrong, too: many small errors cost nothing
    dwell: float = 30.0  # seconds in a mode before the way back; doubled by each fall, up to `longest`
    longest: float = 600.0
    answer: float = 60.0  # seconds that a probe may take
    grace: float = 5.0  # seconds that events of a probe may be late
    again: float = 60.0  # seconds until a cause that was not found is looked for again
    ttl: float = 120.0  # seconds that a prompt counts as cached by our own history
