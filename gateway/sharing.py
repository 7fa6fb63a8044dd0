"""Reservations: gateways that route to the same workers at once do not all choose the one that looks idle.

A router that takes part says what a request costs at each target apart from what waits there. A store adds
what all gateways have reserved there and not yet seen started, and reserves the cheapest, in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bien.core.worker.messages import WorkerInfo
from bien.gateway.routing import Decision, Router, RouteRequest, Target

MOVE = 0.1  # of a request's work that moving its claim must save: others may have gone there since


@dataclass(slots=True)
class Bid:
    """Of a request at one target, in ms. Its price: `cost`, and `wait` or what is reserved, the larger."""

    cost: float  # all but the wait
    wait: float  # for what is ahead of it there, as far as this gateway knows
    work: float  # for which it keeps those behind it waiting: what is reserved until its first token


class Reserved(Protocol):
    """One reservation."""

    @property
    def at(self) -> int:
        """Index of the bid that it is for."""
        ...

    @property
    def waits(self) -> Sequence[float]:
        """Ms reserved at each of the bids' targets, before it was made."""
        ...

    def move(self, at: int, work: float) -> None:
        """To another of the bids' targets, for so many ms."""
        ...

    def release(self) -> None:
        """Its request has started, ended, or was lost. Once; what is not released ends with its gateway."""
        ...


@runtime_checkable
class Reservations(Protocol):
    """What an index with a store may offer beside. Called on the event loop; nothing of it raises because
    the store is away."""

    def shared(self, fp: str) -> bool:
        """Whether to ask for reservations now: other gateways route to workers of this fingerprint, and the
        store answers."""
        ...

    async def reserve(
        self, fp: str, places: Sequence[tuple[str, int]], bids: Sequence[Bid]
    ) -> Reserved | None:
        """Reserve the cheapest of the bids, each for the (worker, dp_rank) beside it. One round trip at
        most. None: no answer in a few ms, or none at all; then nothing is reserved."""
        ...


@runtime_checkable
class BiddingRouter(Router, Protocol):
    """A router that can leave the choice to a store. `take(…, at)` must be what `choose` would be if it
    chose `at`, bookkeeping included."""

    def bids(self, request: RouteRequest, targets: Sequence[Target]) -> Sequence[Bid]:
        """One per target; changes nothing."""
        ...

    def take(self, request: RouteRequest, targets: Sequence[Target], at: int) -> Decision:
        """The target `targets[at]` was chosen."""
        ...


class Sharing:
    """The reservations of one gateway's router."""

    def __init__(self, store: Reservations, router: BiddingRouter) -> None:
        self._store = store
        self._router = router

    @classmethod
    def of(cls, index: object, router: object) -> Sharing | None:
        """None: the index or the router takes no part."""
        if isinstance(index, Reservations) and isinstance(router, BiddingRouter):
            return cls(index, router)
        return None

    def wanted(self, workers: Sequence[WorkerInfo]) -> bool:
        """Whether to ask, of so many. Workers of several fingerprints have no reservations in common."""
        if len(workers) < 2 or not self._store.shared(fp := workers[0].fp):
            return False
        return all(worker.fp == fp for worker in workers)

    async def claim(self, request: RouteRequest, targets: Sequence[Target]) -> Reserved | None:
        bids = self._router.bids(request, targets)
        places = [(t.worker, t.dp_rank) for t in targets]
        return await self._store.reserve(targets[0].info.fp, places, bids)

    def decide(
        self, claim: Reserved, request: RouteRequest, targets: Sequence[Target], anew: bool
    ) -> Decision:
        """Where the reservation is. `anew`: more is known now than when it was made, and may speak for
        another target; the claim then moves."""
        if anew:
            bids = self._router.bids(request, targets)
            prices = [b.cost + max(b.wait, w) for b, w in zip(bids, claim.waits, strict=True)]
            best = min(range(len(prices)), key=prices.__getitem__)
            if prices[best] + MOVE * bids[best].work < prices[claim.at]:
                claim.move(best, bids[best].work)
        decision = self._router.take(request, targets, claim.at)
        decision.reasons["reserved_ms"] = claim.waits[claim.at]
        return decision
