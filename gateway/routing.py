"""The router contract: which (worker, dp_rank) serves a request, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bien.core.worker.messages import WorkerInfo, WorkerStats


@dataclass(slots=True)
class Target:
    """A place that can serve a request, as of now."""

    worker: str
    dp_rank: int
    info: WorkerInfo
    stats: WorkerStats  # as last reported
    inflight: int  # requests of this gateway placed there and not ended
    # Prompt tokens predicted to need computing and not yet reported as started: theirs, and where the worker
    # tells, what other gateways have placed there.
    inflight_tokens: int
    overlap: int  # tokens of this request's prompt that the index says are usable there
    loadable: int = 0  # further tokens, right behind the overlap, that it can load from a slower tier


@dataclass(slots=True)
class RouteRequest:
    """What a router may know of a request."""

    id: str
    tenant: str
    session: str
    prompt_tokens: int
    max_tokens: int
    priority: int
    hashes: bytes


def cached_tokens(request: RouteRequest, target: Target) -> int:
    """What `target` need not compute: overlap and what it loads from a slower tier, in full blocks and short
    of the last token, which is always computed (its logits give the first output)."""
    block = target.info.block_tokens
    return min(target.overlap + target.loadable, request.prompt_tokens - 1) // block * block


@dataclass(slots=True)
class Decision:
    """`target` indexes the list given to `choose`. The gateway gives the same object to `observe`: what a
    router wants to remember of a request it can put into `reasons`, which are exported."""

    target: int
    predicted_cached: int  # tokens that it will not compute, whatever the tier (see `cached_tokens`)
    reasons: dict[str, float | str] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How it went: sent to the router when the request ends."""

    request: RouteRequest
    worker: str
    dp_rank: int
    predicted_cached: int
    cached: int  # actual, -1 if it never ran
    ttft: float  # seconds from placement, -1 without a token
    seconds: float
    finish: str


class Router(Protocol):
    """One instance per gateway; called on the event loop, must not block."""

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        """Pick one of at least one live target. Must be deterministic given its ctx.rng."""
        ...

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """A request ended; `decision` is that of its latest placement."""
        ...

    def report(self, worker: str, stats: WorkerStats) -> None:
        """A worker's load after a step."""
        ...

    def close(self) -> None: ...
