"""Jumped runs equal stepped runs, record for record; and the client keeps its contract in process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bien.core.clock import VirtualClock
from bien.core.engine import Engine, EngineLimits
from bien.core.executors.simulated import SimulatedExecutor
from bien.core.kv.cache import KVCache
from bien.core.plan import ExecutorPlan
from bien.core.request import BlockRuns, GenerateRequest, SamplingParams, TokenIds
from bien.core.scheduler import Scheduler
from bien.core.testing.harness import toy_groups
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.messages import StepFrame, WorkerInfo
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.schedulers.priority import Priority, PriorityConfig

# Ageing in odd numbers: no two sequences, whose arrivals are ends of steps, rank alike but for rounding.
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "fcfs": lambda: Fcfs(FcfsConfig(token_budget=32)),
    "priority": lambda: Priority(PriorityConfig(token_budget=32, ageing_seconds=0.70013)),
    "priority, at most 2": lambda: Priority(
        PriorityConfig(token_budget=32, ageing_seconds=0.20017, max_running=2)
    ),
    "priority, not preempting": lambda: Priority(PriorityConfig(token_budget=32, preempt=False)),
}


def cost(plan: ExecutorPlan) -> float:
    return 0.008 + 0.0005 * plan.tokens


def growing_cost(plan: ExecutorPlan) -> float:
    """Grows with the context, up to a cap."""
    return 0.004 + 0.0005 * plan.tokens + 0.0001 * float(np.minimum(plan.starts + plan.counts, 60).sum())


def growing(plan: ExecutorPlan, steps: int) -> Any:
    return np.array([growing_cost(replace(plan, starts=plan.starts + k)) for k in range(steps)])


def make(
    kinds: str,
    blocks: int,
    slots: int,
    jump: bool,
    counted: list[int],
    scheduler: str = "fcfs",
    grows: bool = False,
    states: int = 6,
) -> InProcessClient:
    groups = toy_groups(kinds)
    sizes = tuple(blocks if g.paged else slots + states for g in groups)
    clock = VirtualClock()

    def count(plan: ExecutorPlan) -> float:
        counted.append(plan.step)
        return growing_cost(plan) if grows else cost(plan)

    executor = SimulatedExecutor(groups, count, 50, virtual=True, growing=growing if grows else None)
    executor.allocate(sizes, slots, 512)
    engine = Engine(
        scheduler=SCHEDULERS[scheduler](),
        cache=KVCache(groups, sizes, 4, slots),
        groups=groups,
        limits=EngineLimits(slots, 512, 4),
        clock=clock,
        rng=random.Random(0),
    )
    return InProcessClient(WorkerInfo("w", "g", "fp"), engine, executor, clock, jump=jump)


class Recorder:
    """One record per request: first and last token's time, tokens, cached."""

    def __init__(self) -> None:
        self.records: dict[int, list[Any]] = {}
        self.events: list[Any] = []
        self.seq = 0

    def on_frame(self, worker: Any, frame: StepFrame) -> None:
        for o in frame.outputs:
            first, last = o.times or (frame.time, frame.time)
            record = self.records.setdefault(o.rid, [first, last, 0, o.cached, None, o.tokens])
            record[1], record[2], record[4] = last, record[2] + o.count, o.finish
        if frame.batch:
            assert frame.batch.seq == self.seq + 1
            self.seq += 1
            for e in frame.batch.events:
                for i in range(0, len(e.hashes), 16):
                    self.events.append((e.op, e.group, e.hashes[i : i + 16]))

    def on_death(self, worker: Any, reason: str) -> None:
        self.records[-1] = [reason]


def play(
    seed: int,
    kinds: str,
    blocks: int,
    slots: int,
    jump: bool,
    scheduler: str = "fcfs",
    grows: bool = False,
    states: int = 6,
) -> tuple[Recorder, int]:
    rng, classes = random.Random(seed), random.Random(seed)
    jobs = []
    for session in range(4):
        base, at = session * 10_000, rng.random()
        length = rng.randint(4, 30)
        for _ in range(3):
            out = rng.randint(1, 40)
            jobs.append((at, base, length, out))
            length += out + rng.randint(0, 10)
            at += rng.random() * 2
            if length > 100:
                break
    counted: list[int] = []
    recorder = Recorder()

    async def main() -> None:
        client = make(kinds, blocks, slots, jump, counted, scheduler, grows, states)
        client.attach(recorder)
        clock = VirtualClock()
        for rid, (at, base, length, out) in enumerate(sorted(jobs)):
            await clock.sleep(at - clock.time())
            prompt = BlockRuns.of([(base, length)])
            forced = BlockRuns.of([(base + length, out)])
            sampling = SamplingParams(out, ignore_eos=True, seed=1)
            urgency = classes.randint(-2, 2)
            client.submit(rid, GenerateRequest(f"r{rid}", prompt, sampling, forced=forced, priority=urgency))
            if rng.random() < 0.1:
                await clock.sleep(0.0503)  # never at the very end of a step
                client.abort(rid)
        while client.alive and (client.engine.busy or client._inbox):
            await clock.sleep(1.0)
            assert clock.time() < 300, client.engine.stats()
        assert client.alive
        client.engine.check_integrity()
        await client.close()

    VirtualClock.run(main())
    return recorder, len(counted)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    kinds=st.sampled_from(["full", "full+window", "full+state"]),
    blocks=st.integers(40, 120),
    slots=st.integers(1, 5),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    grows=st.booleans(),
    states=st.integers(0, 8),
)
# A snapshot that is taken in the middle of a jump lets in who waits.
@example(625364683, "full+state", 37, 2, "priority, not preempting", True, 1)
def test_a_jumped_run_equals_a_stepped_run(
    seed: int, kinds: str, blocks: int, slots: int, scheduler: str, grows: bool, states: int
) -> None:
    """With few blocks for states snapshots evict each other, or find none."""
    stepped, steps = play(seed, kinds, blocks, slots, False, scheduler, grows, states)
    jumped, fewer = play(seed, kinds, blocks, slots, True, scheduler, grows, states)
    assert fewer <= steps
    assert stepped.records.keys() == jumped.records.keys()
    for rid, want in stepped.records.items():
        got = jumped.records[rid]
        assert got[:2] == pytest.approx(want[:2], abs=1e-6), rid
        assert got[2:] == want[2:], rid
    assert sorted(stepped.events) == sorted(jumped.events)


@pytest.mark.parametrize("kinds", ["full", "full+window", "full+state"])
@pytest.mark.parametrize(("blocks", "ratio"), [(200, 3), (45, 2)])
def test_jumps_save_steps(kinds: str, blocks: int, ratio: int) -> None:
    """In every kind of group, and while blocks are evicted."""
    _, steps = play(7, kinds, blocks, 4, jump=False)
    _, fewer = play(7, kinds, blocks, 4, jump=True)
    assert fewer * ratio < steps


def test_real_ids_get_their_forced_tokens() -> None:
    recorder = Recorder()

    async def main() -> None:
        client = make("full", 40, 2, True, [])
        client.attach(recorder)
        request = GenerateRequest(
            "a", TokenIds.of([1, 2, 3]), SamplingParams(3, ignore_eos=True), forced=TokenIds.of([9, 8])
        )
        client.submit(0, request)
        await VirtualClock().sleep(5)
        assert request.id == "a"
        client.kill("boom")
        client.submit(1, request)
        await VirtualClock().sleep(5)

    VirtualClock.run(main())
    assert recorder.records[0][2:5] == [3, 0, "length"]
    assert recorder.records[-1] == ["boom"] and 1 not in recorder.records
