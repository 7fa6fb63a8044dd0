"""Every planted fault is caught by the test that is meant for it; a sound router passes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from bien.core.testing.suites import failures
from bien.core.worker.messages import WorkerStats
from bien.gateway.routing import Decision, Outcome, Router, RouteRequest, Target
from bien.gateway.testing import RouterSuite


def held(target: Target) -> int:
    return target.overlap + target.loadable


class Sound:
    """Most overlap, then least load, then by lot."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        score = [(-t.overlap, t.inflight) for t in targets]
        best = [i for i, s in enumerate(score) if s == min(score)]
        at = self.rng.choice(best)
        return Decision(at, held(targets[at]), {"overlap": float(targets[at].overlap)})

    def observe(self, decision: Decision, outcome: Outcome) -> None: ...

    def report(self, worker: str, stats: WorkerStats) -> None: ...

    def close(self) -> None: ...


class SeesOneTier(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at = super().choose(request, targets).target
        return Decision(at, targets[at].overlap)


class RemembersTheDead(Sound):
    """Believes its own history instead of the index."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.sent: dict[tuple[str, str], int] = {}

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at = super().choose(request, targets).target
        key = request.session, targets[at].worker
        cached = max(held(targets[at]), self.sent.get(key, 0))
        self.sent[key] = request.prompt_tokens // 16 * 16
        return Decision(at, cached)


class CountsOnly(Sound):
    """Takes it that cumulative counts never fall."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.last: dict[str, int] = {}

    def report(self, worker: str, stats: WorkerStats) -> None:
        before, self.last[worker] = self.last.get(worker, 0), stats.steps
        if stats.steps < before:
            raise ValueError("a worker went back in time")


class OutOfRange(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        return Decision(self.rng.randint(0, len(targets)), 0)


class Negative(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        return Decision(-1, 0)


class ClingsToTheDead(Sound):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.homes: dict[str, int] = {}

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at = self.homes.setdefault(request.session, super().choose(request, targets).target)
        return Decision(at, held(targets[at]) if at < len(targets) else 0)


class Mutates(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        decision = super().choose(request, targets)
        targets[decision.target].inflight += 1
        return decision


class MutatesDeeply(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        decision = super().choose(request, targets)
        targets[decision.target].stats.waiting += 1
        return decision


class Unrepeatable(Sound):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(random.Random())


class Blocks(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        time.sleep(0.0001)
        return super().choose(request, targets)


class WaitsForALock(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        done = threading.Event()
        threading.Thread(target=done.set).start()
        done.wait()
        return super().choose(request, targets)


class Awaits(Sound):
    async def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().choose(request, targets)


class Boasts(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at = super().choose(request, targets).target
        return Decision(at, max(0, request.prompt_tokens - 1))  # ignores what the index says


class PrefersTheFirst(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at = min(range(len(targets)), key=lambda i: (-targets[i].overlap, targets[i].inflight))
        return Decision(at, targets[at].overlap)


class Lopsided(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        at = 0 if self.rng.random() < 0.7 else self.rng.randrange(len(targets))
        return Decision(at, targets[at].overlap)


class Secretive(Sound):
    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        decision = super().choose(request, targets)
        return Decision(decision.target, 0, {"why": object()})  # type: ignore[dict-item]


class Presumes(Sound):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.chosen: dict[str, int] = {}

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        if outcome.worker == "stranger":
            del self.chosen[outcome.worker]


def suite_of(router: type[Sound]) -> type[RouterSuite]:
    class Suite(RouterSuite):
        def build(self, rng: random.Random) -> Router:
            made: Any = router(rng)
            return made  # type: ignore[no-any-return]

    return Suite


def test_a_sound_router_passes() -> None:
    assert failures(suite_of(Sound)) == []


@pytest.mark.parametrize(
    ("router", "caught_by"),
    [
        (OutOfRange, "test_picks_one_of_the_targets"),
        (Negative, "test_picks_one_of_the_targets"),
        (ClingsToTheDead, "test_survives_a_shrinking_list"),
        (Mutates, "test_changes_nothing_that_it_is_given"),
        (MutatesDeeply, "test_changes_nothing_that_it_is_given"),
        (Unrepeatable, "test_the_same_seed_decides_the_same"),
        (Blocks, "test_does_not_block"),
        (WaitsForALock, "test_does_not_block"),
        (Awaits, "test_does_not_block"),
        (Boasts, "test_predicts_no_more_than_the_index_says"),
        (PrefersTheFirst, "test_ties_are_fair"),
        (Lopsided, "test_ties_are_fair"),
        (SeesOneTier, "test_predicts_what_a_slower_tier_holds"),
        (RemembersTheDead, "test_a_worker_may_come_back_with_an_empty_cache"),
        (CountsOnly, "test_a_worker_may_come_back_with_an_empty_cache"),
        (Secretive, "test_reasons_can_be_exported"),
        (Presumes, "test_hears_of_workers_that_it_never_chose"),
    ],
)
def test_a_planted_fault_is_caught(router: type[Sound], caught_by: str) -> None:
    assert caught_by in [line.split(":")[0] for line in failures(suite_of(router))]
