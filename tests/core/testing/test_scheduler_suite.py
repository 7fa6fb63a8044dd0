"""The scheduler suite passes a correct scheduler and catches every planted fault."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.plan import PlanItem, StepPlan
from bien.core.scheduler import SchedulerView
from bien.core.sequence import Sequence, Status
from bien.core.testing.fake_engine import Room
from bien.core.testing.scheduler import Arrival, Scenario, SchedulerSuite, run
from bien.core.testing.suites import failures


class Plain:
    """Correct: who decodes, then first come, first served; the youngest gives way. Faults override one
    method each."""

    budget = 16

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.stationary = False

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)

    def plan(self, view: SchedulerView) -> StepPlan:
        plan, short = StepPlan(), False
        order = self.order()
        for at, s in enumerate(order):
            left = self.budget - sum(i.tokens for i in plan.items)
            if s.status is not Status.RUNNING or left < 1:
                continue
            item = self.item(view, s, left)
            if item is None:
                continue
            self.cut(item, left, order[at + 1 :])
            while not self.reserve(view, s, item):
                short = True
                victim = self.running[-1]
                if victim.status is not Status.RUNNING:
                    break
                plan.items = [i for i in plan.items if i.sequence is not victim]
                self.evict(view, victim)
                if victim is s:
                    break
            else:
                plan.items.append(item)
        while self.waiting and not short and self.admit(view, self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        self.stationary = self.repeats(plan, short)
        if not plan.items and not short and any(s.status is Status.RUNNING for s in self.running):
            return self.after_admission(view)
        return plan

    def after_admission(self, view: SchedulerView) -> StepPlan:
        """What was admitted just now can be planned in the same step."""
        self.stationary = False
        for s in self.running:
            item = self.item(view, s, self.budget) if s.status is Status.RUNNING else None
            if item is not None and self.reserve(view, s, item):
                return StepPlan([item])
        return StepPlan()

    def order(self) -> list[Sequence]:
        return sorted(self.running, key=lambda s: s.pending != 1)

    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        if not s.pending:
            return None
        new = view.chunk(s, min(s.pending, left))
        drafts = min(s.drafts, left - new) if new == s.pending else 0
        return PlanItem(s, new + drafts, drafts) if new else None

    def cut(self, item: PlanItem, left: int, behind: list[Sequence]) -> None:
        """Who decodes further on goes before drafts."""
        spare = left - sum(s.status is Status.RUNNING and s.pending == 1 for s in behind)
        drafts = min(item.drafts, max(0, spare - item.tokens + item.drafts))
        item.tokens, item.drafts = item.tokens - item.drafts + drafts, drafts

    def reserve(self, view: SchedulerView, s: Sequence, item: PlanItem) -> bool:
        return view.reserve(s, item.tokens)

    def admit(self, view: SchedulerView, s: Sequence) -> bool:
        return view.admit(s)

    def evict(self, view: SchedulerView, victim: Sequence) -> None:
        view.preempt(victim)
        self.running.remove(victim)
        self.waiting.insert(0, victim)

    def repeats(self, plan: StepPlan, short: bool) -> bool:
        rows = plan.items
        return (
            not short
            and len(rows) == len(self.running)
            and all(i.tokens == 1 and i.sequence.pending == 1 for i in rows)
        )

    def note(self, elapsed: float, tokens: int) -> None: ...

    def close(self) -> None: ...


class TakesATokenAtLeast(Plain):
    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        return super().item(view, s, left) or (PlanItem(s, 1) if s.pending else None)


class StarvesTheFirst(Plain):
    def order(self) -> list[Sequence]:
        return [s for s in self.running if s.order > 0]

    def after_admission(self, view: SchedulerView) -> StepPlan:
        return StepPlan()


class PlansTwice(Plain):
    def order(self) -> list[Sequence]:
        return self.running[:1] + self.running


class ExceedsPending(Plain):
    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        return PlanItem(s, s.pending + 1) if s.pending else None


class PlansNothingPending(Plain):
    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        return super().item(view, s, left) or PlanItem(s, 1)


class PlansItemsOfNothing(Plain):
    """They are as good as none: who plans nothing else stands still."""

    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        return PlanItem(s, 0)


class PlansWithoutReserve(Plain):
    def reserve(self, view: SchedulerView, s: Sequence, item: PlanItem) -> bool:
        return True


class ForgetsDraftsInReserve(Plain):
    def reserve(self, view: SchedulerView, s: Sequence, item: PlanItem) -> bool:
        return view.reserve(s, item.tokens - item.drafts)


class PlansUnadmitted(Plain):
    def plan(self, view: SchedulerView) -> StepPlan:
        plan = super().plan(view)
        plan.items += [PlanItem(s, 1) for s in self.waiting[:1]]
        return plan


class PlansLoading(Plain):
    def plan(self, view: SchedulerView) -> StepPlan:
        plan = super().plan(view)
        plan.items += [PlanItem(s, 1) for s in self.running if s.status is Status.LOADING]
        return plan


class NeverPreempts(Plain):
    def plan(self, view: SchedulerView) -> StepPlan:
        plan = StepPlan()
        for s in self.running:
            item = self.item(view, s, 16) if s.status is Status.RUNNING else None
            if item is not None and view.reserve(s, item.tokens):
                plan.items.append(item)
        while self.waiting and view.admit(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        return plan or self.after_admission(view)


class DropsThePreempted(Plain):
    def evict(self, view: SchedulerView, victim: Sequence) -> None:
        super().evict(view, victim)
        self.waiting.remove(victim)


class KeepsThePreemptedPlanned(Plain):
    def plan(self, view: SchedulerView) -> StepPlan:
        before = list(self.running)
        plan = super().plan(view)
        plan.items += [PlanItem(s, 1) for s in before if s.preemptions and s.status is Status.WAITING]
        return plan


class PlansRemoved(Plain):
    def remove(self, sequence: Sequence) -> None: ...


class KeepsWhatEnded(Plain):
    """Nobody sees it, until memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[Sequence] = []

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self.ended.append(sequence)


class DraftsBehindAChunk(Plain):
    budget = 2

    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        made = super().item(view, s, left)
        return PlanItem(s, made.tokens + 1, made.drafts + 1) if made else None


class DraftsBeforeOthersDecode(Plain):
    """Nobody starves: budgets are large, and drafts are few, but in one test."""

    budget = 512

    def cut(self, item: PlanItem, left: int, behind: list[Sequence]) -> None: ...


class IgnoresTheChunk(Plain):
    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        new = min(s.pending, left)
        return PlanItem(s, new) if new else None


class LiesAboutStationary(Plain):
    def repeats(self, plan: StepPlan, short: bool) -> bool:
        return bool(plan.items)


class TurnsTheOrder(Plain):
    """Says that plans repeat while it rotates them."""

    def order(self) -> list[Sequence]:
        self.running = self.running[1:] + self.running[:1]
        return list(self.running)


class WritesToSequences(Plain):
    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)

    def item(self, view: SchedulerView, s: Sequence, left: int) -> PlanItem | None:
        s.preemptions = 0
        s.drafts = 0
        return super().item(view, s, left)


class ThrowsDice(Plain):
    def order(self) -> list[Sequence]:
        return random.sample(self.running, len(self.running))

    def repeats(self, plan: StepPlan, short: bool) -> bool:
        return False


class AdmitsTwice(Plain):
    def admit(self, view: SchedulerView, s: Sequence) -> bool:
        return view.admit(s) and view.admit(s)


class PreemptsWhatWaits(Plain):
    def evict(self, view: SchedulerView, victim: Sequence) -> None:
        super().evict(view, victim)
        view.preempt(victim)


class InventsWork(Plain):
    def plan(self, view: SchedulerView) -> StepPlan:
        plan = super().plan(view)
        return plan if plan.items else StepPlan([PlanItem(None, 1)])  # type: ignore[arg-type]


def suite_of(build: Callable[[], Plain]) -> type[SchedulerSuite]:
    return type("Suite", (SchedulerSuite,), {"build": lambda self: build(), "rounds": 40})


@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_a_correct_scheduler_passes(budget: int):
    made = type("Sized", (Plain,), {"budget": budget})
    assert failures(suite_of(made)) == []


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (StarvesTheFirst, "stalls"),
        (PlansTwice, "twice in one step"),
        (KeepsWhatEnded, "are still referred to"),
        (ExceedsPending, "its pending"),
        (PlansNothingPending, "valid: 1..0"),
        (PlansItemsOfNothing, "stalls"),
        (PlansWithoutReserve, "without reserving"),
        (ForgetsDraftsInReserve, "without reserving"),
        (PlansUnadmitted, "which is WAITING: not RUNNING"),
        (PlansLoading, "which is LOADING: not RUNNING"),
        (NeverPreempts, "stalls"),
        (DropsThePreempted, "stalls"),
        (KeepsThePreemptedPlanned, "which is WAITING: not RUNNING"),
        (PlansRemoved, "it was removed"),
        (DraftsBehindAChunk, "drafts"),
        (DraftsBeforeOthersDecode, "which decodes"),
        (IgnoresTheChunk, "view.chunk allows"),
        (TakesATokenAtLeast, "view.chunk allows 0"),
        (LiesAboutStationary, "said `stationary`"),
        (TurnsTheOrder, "said `stationary`"),
        (WritesToSequences, "only the engine may"),
        (ThrowsDice, "planned differently"),
        (AdmitsTwice, "not WAITING"),
        (PreemptsWhatWaits, "preempted"),
        (InventsWork, "empty plan"),
    ],
)
def test_a_planted_fault_is_caught_and_named(broken: type[Plain], says: str):
    found = failures(suite_of(broken))
    assert any(says in line for line in found), found


rooms = st.builds(
    Room,
    slots=st.integers(1, 5),
    blocks=st.integers(6, 30),
    block_tokens=st.sampled_from([1, 2, 4]),
    depth=st.sampled_from([1, 2]),
    boundary=st.sampled_from([0, 1, 3, 4]),
    load_polls=st.sampled_from([0, 2]),
    drafts=st.sampled_from([0, 3]),
    narrow=st.booleans(),
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    room = draw(rooms)
    most = room.blocks * room.block_tokens
    arrivals = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(st.integers(1, most - 1))
        output = draw(st.integers(1, min(30, most - prompt)))
        step = draw(st.integers(0, 20))
        abort = draw(st.sampled_from([0, 0, step + 1, step + 9]))
        arrivals.append(Arrival(step, prompt, output, draw(st.integers(0, output)), abort))
    return Scenario(room, tuple(arrivals), draw(st.integers(0, 1 << 32)))


@settings(max_examples=150)
@given(scenarios())
def test_the_correct_one_survives_any_scenario(scenario: Scenario):
    gone = {f"r{i}" for i, a in enumerate(sorted(scenario.arrivals, key=lambda a: a.step)) if a.abort}
    engine = run(Plain(), scenario)
    assert {f"r{i}" for i in range(len(scenario.arrivals))} - gone <= set(engine.finished)


def test_a_failure_is_reported_with_few_requests():
    found = failures(suite_of(LiesAboutStationary))
    line = next(f for f in found if f.startswith("test_every_request_ends"))
    assert line.count("Arrival(") <= 3
