"""What is simulated for `bien route explain`, and what is kept of it: both travel between processes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.deployment import Deployment

Floats = NDArray[np.float64]

COLUMNS = (
    "sent",  # seconds of the run's clock
    "ttft",  # seconds; NaN without a token
    "prompt",  # tokens, as are the following
    "output",
    "cached",  # of the prompt, as the engine counted
    "predicted",  # by the router
    "here",  # what the index said of the chosen worker, when the request was placed
    "best",  # the same of the worker that held most
    "whole",  # blocks of an infinite cache, as tokens
    "shared",  # the same token by token
    "queued",  # uncomputed prompt tokens at the chosen worker
    "ahead",  # the same at the worker that held most
    "worker",  # chosen; an index of `workers`
    "holder",  # the worker that held most; likewise
)


class Placement(msgspec.Struct):
    """Which worker serves which request, by their positions in these lists."""

    ids: list[str]
    workers: list[int]


class Variant(msgspec.Struct):
    """One simulation."""

    name: str  # of the policy; of a placement or of the pool for people
    deployment: Deployment
    concurrency: int
    seed: int = 0
    time_scale: float = 1.0
    gap_cap: float | None = None
    pool_of: int = 0  # workers that the only worker stands for (pooled.py)
    reasons: bool = False  # whether the router's reasons are kept
    placement: Placement | None = None  # instead of the deployment's router
    hindsight: Hindsight | None = None  # search for a better placement first, and take that


class Hindsight(msgspec.Struct):
    """Where a search for a placement begins (hindsight.py)."""

    seen: Seen  # a run whose times are taken for granted
    capacity: int  # tokens of one worker
    balanced: bool  # begin with session trees spread by their work, not with the run's own placement
    seed: int


class Seen(msgspec.Struct):
    """A simulation that has ended. Turns are in the order in which they were sent."""

    name: str
    workers: list[str] = []
    busy: list[float] = []  # seconds, by worker
    seconds: float = 0.0  # of virtual time
    ids: list[str] = []  # session/stream/turn
    packed: dict[str, bytes] = {}  # float64 by name, see COLUMNS
    reasons: list[dict[str, Any]] = []  # of the router, where they were asked for
    errors: dict[str, int] = {}  # how many turns ended with it

    def __getitem__(self, column: str) -> Floats:
        return np.frombuffer(self.packed[column], np.float64)

    @property
    def hit(self) -> float:
        """Cached over all prompt tokens."""
        return float(self["cached"].sum() / max(1.0, self["prompt"].sum()))

    @property
    def whole_run(self) -> bool:
        """Whether every turn ended well: else the figures are of other turns than those of other runs."""
        return bool(self.ids) and not self.errors

    @property
    def mean_ttft_ms(self) -> float:
        ttft = self.ttft_ms
        return float(ttft.mean()) if len(ttft) else float("inf")

    @property
    def ttft_ms(self) -> Floats:
        """Of turns that had a token."""
        ttft = self["ttft"]
        return ttft[~np.isnan(ttft)] * 1e3

    @property
    def placement(self) -> Placement:
        return Placement(self.ids, self["worker"].astype(int).tolist())
