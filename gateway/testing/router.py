"""Conformance suite of routers. Subclass it in your tests and give `build`:

class TestMine(RouterSuite):
    def build(self, rng):
        return MyRouter(MyConfig(), rng)
"""

from __future__ import annotations

import copy
import inspect
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.gateway.routing import Decision, Outcome, Router, RouteRequest, Target

BLOCK = 16
# What suspends a thread, as (module, qualified name) of built-in functions.
SUSPENDING = {
    ("time", "sleep"),
    ("select", "select"),
    ("select", "poll"),
    (None, "lock.acquire"),
    (None, "SimpleQueue.get"),
    ("posix", "read"),
    ("posix", "waitpid"),
    ("posix", "system"),
    ("io", "open"),
    ("_io", "open"),
    (None, "socket.connect"),
    (None, "socket.recv"),
    (None, "socket.send"),
    (None, "socket.sendall"),
}


def make_request(n: int, prompt_tokens: int = 1000, session: str = "") -> RouteRequest:
    hashes = random.Random(n).randbytes(16 * (prompt_tokens // BLOCK))
    return RouteRequest(f"r{n}", "", session or f"s{n}", prompt_tokens, 100, 0, hashes)


def make_target(name: str, overlap: int = 0, inflight: int = 0, tokens: int = 0, **stats: Any) -> Target:
    """`stats` are fields of WorkerStats."""
    info = WorkerInfo(name, f"{name}.1", "fp", block_tokens=BLOCK, max_context=1 << 20, slots=8)
    return Target(name, 0, info, WorkerStats(**stats), inflight, tokens, overlap)


def random_case(rng: random.Random, n: int) -> tuple[RouteRequest, list[Target]]:
    """A request and one to eight targets; overlaps are whole blocks, short of the last token, and so is what
    can be loaded beyond them, at some targets."""
    request = make_request(n, rng.randint(1, 4000), f"s{rng.randint(0, 5)}")
    whole = (request.prompt_tokens - 1) // BLOCK
    targets = []
    for name in rng.sample("abcdefgh", rng.randint(1, 8)):
        overlap = BLOCK * rng.choice([0, whole, rng.randint(0, whole)])
        load = {"running": rng.randint(0, 8), "waiting": rng.randint(0, 3)}
        queued = rng.choice([0, rng.randint(0, 9000)])
        total = rng.choice([0, 200, 400])
        used = rng.randint(0, total // 2)
        load |= {"used_blocks": used, "cached_blocks": rng.randint(0, total - used), "total_blocks": total}
        target = make_target(
            name, overlap, rng.randint(0, 8), rng.randint(0, 2000), queued_tokens=queued, **load
        )
        target.loadable = rng.choice([0, BLOCK * rng.randint(0, whole - overlap // BLOCK)])
        targets.append(target)
    return request, targets


class RouterSuite:
    """What every router must do, whatever its policy."""

    rounds = 200
    """Random cases per test."""
    ties = 400
    """Requests that meet four equal targets."""

    def build(self, rng: random.Random) -> Router:
        """A fresh router; equal `rng`s must give equal routers."""
        raise NotImplementedError("a suite needs `def build(self, rng): return <your router>`")

    def test_picks_one_of_the_targets(self) -> None:
        """They are those alive now: a worker chosen before may be gone, a new one may stand in its place."""
        for decision, _, targets in self._decisions(1):
            assert type(decision.target) is int, f"Decision.target is {decision.target!r}; valid: an int"
            assert 0 <= decision.target < len(targets), (
                f"target {decision.target} of {len(targets)}: workers come and go between two calls"
            )

    def test_survives_a_shrinking_list(self) -> None:
        router = self.build(random.Random(2))
        everyone = [make_target(name) for name in "abcdef"]
        for n in range(60):
            targets = everyone[: 6 - n // 10]
            decision = _choose(router, make_request(n, session=f"s{n % 10}"), targets)
            assert 0 <= decision.target < len(targets), f"target {decision.target}: that worker is gone"
        router.close()

    def test_predicts_no_more_than_the_index_says(self) -> None:
        """Parity of predicted and actual cached tokens is an alarm; a router must not spoil it."""
        for decision, _, targets in self._decisions(3):
            target, said = targets[decision.target], decision.predicted_cached
            most = target.overlap + target.loadable
            assert type(said) is int, f"Decision.predicted_cached is {said!r}; valid: an int"
            assert 0 <= said <= most, f"predicted_cached {said} where overlap and loadable are {most}"

    def test_predicts_what_a_slower_tier_holds(self) -> None:
        """Engines count what they load as cached: a router that leaves it out is never right."""
        router = self.build(random.Random(10))
        for n in range(20):
            target = make_target("a", 20 * BLOCK)
            target.loadable = n * BLOCK
            said = _choose(router, make_request(n), [target]).predicted_cached
            most = target.overlap + target.loadable
            assert said == most, f"predicted_cached {said} where overlap and loadable are {most}"
        router.close()

    def test_a_worker_may_come_back_with_an_empty_cache(self) -> None:
        """Under its old name, in another generation, its counters at zero."""
        router = self.build(random.Random(11))
        for n in range(60):
            worn = n % 20
            targets = [
                make_target(name, steps=worn, output_tokens=9 * worn, finished=worn, total_blocks=100)
                for name in "ab"
            ]
            for target in targets:
                generation = f"{target.worker}.{n // 20}"
                target.info = msgspec.structs.replace(target.info, generation=generation)
            request = make_request(n, session=f"s{n % 7}")
            decision = _choose(router, request, targets)
            assert 0 <= decision.target < 2 and decision.predicted_cached == 0, f"{decision} of empty caches"
            _inform(router, decision, request, targets, n)
        router.close()

    def test_changes_nothing_that_it_is_given(self) -> None:
        router = self.build(random.Random(4))
        rng = random.Random(4)
        for n in range(self.rounds):
            request, targets = random_case(rng, n)
            before = copy.deepcopy((request, targets))
            decision = _choose(router, request, targets)
            _inform(router, decision, request, targets, n)
            assert before == (request, targets), "request and targets belong to the gateway"
        router.close()

    def test_the_same_seed_decides_the_same(self) -> None:
        """Simulations must be repeatable: no clock, no hash order, no random source but ctx.rng."""
        runs = [[d for d, _, _ in self._decisions(5)] for _ in range(2)]
        for n, (one, two) in enumerate(zip(*runs, strict=True)):
            assert one == two, f"call {n}: {one} and {two}, from routers built and used alike"

    def test_ties_are_fair(self) -> None:
        """Four equal idle targets, fresh sessions: each must get its share, or it becomes a hot spot."""
        router = self.build(random.Random(6))
        counts: Counter[str] = Counter()
        for n in range(self.ties):
            targets = [make_target(name) for name in "abcd"]
            counts[targets[_choose(router, make_request(n), targets).target].worker] += 1
        router.close()
        least = self.ties // 8  # half of a fair share; a fair draw of 400 is below with p < 1e-8
        assert min(counts[name] for name in "abcd") >= least, f"equal targets got {dict(counts)}"

    def test_does_not_block(self) -> None:
        """`choose` runs on the event loop: it may neither be a coroutine nor suspend the thread."""
        router = self.build(random.Random(7))
        rng = random.Random(7)
        for n in range(20):
            request, targets = random_case(rng, n)
            with _Suspensions() as found:
                decision = _choose(router, request, targets)
            with found:
                _inform(router, decision, request, targets, n)
            assert not found.names, f"it suspends the event loop in {', '.join(sorted(found.names))}"
        router.close()

    def test_reasons_can_be_exported(self) -> None:
        for decision, _, _ in self._decisions(8):
            for name, value in decision.reasons.items():
                assert isinstance(name, str), f"reason {name!r}; valid: a str"
                assert isinstance(value, (int, float, str)), (
                    f"reason {name} is {value!r}; valid: a number or str"
                )
            json.dumps(decision.reasons, allow_nan=False)

    def test_hears_of_workers_that_it_never_chose(self) -> None:
        router = self.build(random.Random(9))
        request, targets = make_request(0), [make_target("a")]
        router.report("stranger", WorkerStats(running=3))
        decision = _choose(router, request, targets)
        router.observe(decision, Outcome(request, "stranger", 0, 0, -1, -1.0, 0.0, "error"))
        router.close()

    def _decisions(self, seed: int) -> list[tuple[Decision, RouteRequest, list[Target]]]:
        router = self.build(random.Random(seed))
        rng = random.Random(seed)
        out = []
        for n in range(self.rounds):
            request, targets = random_case(rng, n)
            decision = _choose(router, request, targets)
            out.append((decision, request, targets))
            _inform(router, decision, request, targets, n)
        router.close()
        return out


def _choose(router: Router, request: RouteRequest, targets: list[Target]) -> Decision:
    decision: object = router.choose(request, targets)
    if inspect.iscoroutine(decision):
        decision.close()
        raise AssertionError("choose is a coroutine function; it must not wait")
    assert isinstance(decision, Decision), f"choose returned {decision!r}; valid: a Decision"
    return decision


def _inform(router: Router, decision: Decision, request: RouteRequest, targets: list[Target], n: int) -> None:
    worker = targets[n % len(targets)]
    router.report(worker.worker, msgspec.structs.replace(worker.stats))
    cached = n % (request.prompt_tokens + 1) - 1
    ended = Outcome(request, worker.worker, 0, decision.predicted_cached, cached, 0.1, 1.0, "stop")
    router.observe(decision, ended)


class _Suspensions:
    """Notes the calls of built-in functions that suspend the thread, without any clock."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> _Suspensions:
        self._before = sys.getprofile()
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _seen(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            name = getattr(function, "__qualname__", "")
            if (getattr(function, "__module__", None), name) in SUSPENDING:
                self.names.add(name)
