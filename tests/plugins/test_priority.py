"""Classes of urgency: who goes first, who gives way, and for how long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.compose import compose
from bien.core.deployment import parse_deployment
from bien.core.errors import DeploymentError
from bien.core.plugins import PluginManager
from bien.core.sequence import Sequence, Status
from bien.core.testing.fake_engine import FakeEngine, Room
from bien.core.testing.scheduler import SchedulerSuite
from bien.core.testing.suites import failures
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.schedulers.priority import Priority, PriorityConfig

WIDE = Room(slots=2, blocks=1000)


class TestPriority(SchedulerSuite):
    def build(self) -> Priority:
        return Priority(PriorityConfig())


class Classes(SchedulerSuite):
    """The whole suite with requests of many classes: `add` gives each sequence its own."""

    config = PriorityConfig()
    rounds = 100

    def build(self) -> Priority:
        rng = random.Random(3)

        class Mixed(Priority):
            def add(self, sequence: Sequence) -> None:
                sequence.request.priority = rng.randint(-2, 2)
                super().add(sequence)

        return Mixed(self.config)


@pytest.mark.parametrize(
    "config",
    [
        PriorityConfig(),
        PriorityConfig(token_budget=5),
        PriorityConfig(max_running=2),
        PriorityConfig(ageing_seconds=0.05),
        PriorityConfig(preempt=False),
    ],
)
def test_it_conforms_with_mixed_classes(config: PriorityConfig) -> None:
    assert failures(type("Suite", (Classes,), {"config": config})) == []


def engine(room: Room = WIDE, **config: object) -> FakeEngine:
    return FakeEngine(Priority(PriorityConfig(**config)), room)  # type: ignore[arg-type]


def drain(fake: FakeEngine) -> list[str]:
    while fake.busy:
        fake.step()
    return fake.finished


def planned(fake: FakeEngine) -> list[str]:
    return [id for id, _, _ in fake.log[-1]]


def test_one_class_is_first_come_first_served() -> None:
    logs = []
    for scheduler in (Priority(PriorityConfig()), Fcfs(FcfsConfig())):
        fake = FakeEngine(scheduler, Room(slots=3, blocks=20), seed=1)
        for i in range(8):
            fake.submit(5 + i, 9, priority=4)
            fake.step()
        drain(fake)
        logs.append(fake.log)
    assert logs[0] == logs[1]


def test_the_urgent_overtake_those_that_wait() -> None:
    fake = engine(preempt=False)
    for priority in (0, 0, 9, 9, 1):  # two run, the rest wait
        fake.submit(4, 5, priority=priority)
    assert drain(fake) == ["r0", "r1", "r4", "r2", "r3"]


def test_the_urgent_are_not_held_up_by_a_long_prompt() -> None:
    fake = engine(token_budget=8)
    fake.submit(400, 2, priority=1)
    fake.step()
    fake.submit(8, 2, priority=0)
    fake.step()
    assert planned(fake)[0] == "r1"
    assert drain(fake) == ["r1", "r0"]


@pytest.mark.parametrize(
    "room", [Room(slots=2, blocks=1000), Room(slots=9, blocks=14)], ids=["slots", "memory"]
)
def test_a_less_urgent_one_gives_way_and_comes_back(room: Room) -> None:
    fake = engine(room)
    fake.submit(20, 4, priority=1)
    fake.submit(20, 4, priority=2)
    fake.step()
    assert planned(fake) == ["r0", "r1"]
    fake.submit(20, 4, priority=0)
    fake.step()
    assert planned(fake) == ["r0", "r2"], "the least urgent is the victim"
    assert drain(fake) == ["r0", "r2", "r1"]


@pytest.mark.parametrize("priority", [0, 1])
def test_equals_are_not_preempted(priority: int) -> None:
    fake = engine(Room(slots=1, blocks=1000))
    fake.submit(8, 6, priority=0)
    fake.step()
    fake.submit(8, 1, priority=priority)
    assert drain(fake) == ["r0", "r1"]


def test_without_preempt_nobody_gives_way() -> None:
    fake = engine(Room(slots=1, blocks=1000), preempt=False)
    fake.submit(8, 6, priority=5)
    fake.step()
    fake.submit(8, 1, priority=0)
    assert drain(fake) == ["r0", "r1"]


def test_ageing_bounds_how_long_others_overtake() -> None:
    """A stream of urgent requests keeps the one slot busy for ever; the patient one still gets it."""
    fake = engine(Room(slots=1, blocks=1000), ageing_seconds=0.5)
    patient = fake.submit(4, 3, priority=2)
    late = []
    while patient not in fake.finished:
        if len(fake.live) < 4:
            urgent = fake.submit(4, 3, priority=0)
            if fake.now > 2 * 0.5:
                late.append(urgent)
        fake.step()
        assert fake.now < 2.0, "two classes at 0.5 s: whoever arrives after 1 s stands behind"
    assert fake.now > 1.0, "until then the urgent went first"
    assert not set(late) & set(fake.finished)


def test_a_waiting_urgent_one_takes_no_promise_of_repetition_away() -> None:
    """Nothing that runs is less urgent than it: plans repeat, and simulations may jump."""
    fake = engine(Room(slots=1, blocks=1000))
    scheduler = fake._scheduler
    fake.submit(4, 30, priority=0)
    fake.step()
    fake.step()
    assert scheduler.stationary
    fake.submit(4, 30, priority=1)
    fake.step()
    assert scheduler.stationary
    fake.submit(4, 30, priority=-1)
    fake.step()
    assert planned(fake) == ["r2"] and not scheduler.stationary
    fake.step()
    assert scheduler.stationary


@pytest.mark.parametrize(
    "parameters", [{"token_budget": 0}, {"max_running": -1}, {"ageing_seconds": 0.0}, {"ageing_seconds": "x"}]
)
def test_parameters_out_of_range_are_refused(parameters: dict[str, object]) -> None:
    pool = {"scheduler": {"use": "priority", **parameters}}
    with pytest.raises(DeploymentError, match=rf"pool\[0\]\.scheduler\.{next(iter(parameters))}"):
        compose(parse_deployment({"pool": [pool]}), PluginManager.load())


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(-3, 3), st.integers(1, 20), st.integers(1, 9)),
    min_size=1,
    max_size=14,
)  # steps after the one before; class; prompt; output


class Watched(FakeEngine):
    """Tells an oracle what was admitted and preempted, while who waited and ran."""

    def __init__(self, scheduler: Priority, room: Room, oracle: Oracle) -> None:
        super().__init__(scheduler, room)
        self._oracle = oracle

    def admit(self, sequence: Sequence) -> bool:
        self._oracle.admits(sequence, list(self._live.values()))
        return super().admit(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self._oracle.preempts(sequence, list(self._live.values()))
        super().preempt(sequence)


class Oracle:
    """The rules in words of arrival and class alone."""

    def __init__(self, ageing: float, roomy: bool = False) -> None:
        self.ageing = ageing
        self.roomy = roomy  # memory is never short: only admission preempts

    def ahead(self, a: Sequence, b: Sequence) -> bool:
        """Whether `a` goes before `b`: one class is worth `ageing` seconds of arrival."""
        head_start = (b.request.priority - a.request.priority) * self.ageing
        return (a.arrival - b.arrival, a.order) < (head_start, b.order)

    def admits(self, s: Sequence, live: list[Sequence]) -> None:
        for other in live:
            if other.status is Status.WAITING and other is not s:
                assert self.ahead(s, other), f"{s.id} was tried while {other.id} waited"

    def preempts(self, victim: Sequence, live: list[Sequence]) -> None:
        for other in live:
            if other.status is Status.RUNNING and other is not victim:
                assert self.ahead(other, victim), f"{victim.id} went, {other.id} stands behind it"
        for_whom = [
            o
            for o in live
            if o.status is Status.WAITING
            and self.ahead(o, victim)
            and o.request.priority < victim.request.priority
        ]
        assert for_whom or not self.roomy, f"{victim.id} went for nobody"


@settings(max_examples=60, deadline=None)
@given(
    arrivals=ARRIVALS,
    ageing=st.sampled_from([0.02, 0.1, 1.0]),
    slots=st.integers(1, 3),
    blocks=st.integers(8, 20),
    preempt=st.booleans(),
)
def test_whoever_arrives_when(
    arrivals: list[tuple[int, int, int, int]], ageing: float, slots: int, blocks: int, preempt: bool
) -> None:
    """In order always; the last is the victim; no admission preempts equals, nor for ever."""
    config = PriorityConfig(ageing_seconds=ageing, preempt=preempt)
    fake = Watched(Priority(config), Room(slots=slots, blocks=blocks), Oracle(ageing))
    for wait, priority, prompt, output in arrivals:
        for _ in range(wait):
            if fake.busy:
                fake.step()
        fake.submit(min(prompt, blocks * 4 - output), output, priority=priority)
    assert sorted(drain(fake)) == sorted(f"r{i}" for i in range(len(arrivals)))


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, ageing=st.sampled_from([0.02, 0.1, 1.0]), slots=st.integers(1, 3))
def test_with_memory_enough_each_is_preempted_once_at_most_by_each_more_urgent(
    arrivals: list[tuple[int, int, int, int]], ageing: float, slots: int
) -> None:
    scheduler = Priority(PriorityConfig(ageing_seconds=ageing))
    fake = Watched(scheduler, Room(slots=slots, blocks=1000), Oracle(ageing, roomy=True))
    made: list[Sequence] = []
    for wait, priority, prompt, output in arrivals:
        for _ in range(wait):
            if fake.busy:
                fake.step()
        made.append(fake._live[fake.submit(prompt, output, priority=priority)])
    drain(fake)
    for s in made:
        within = [
            o
            for o in made
            if o.request.priority < s.request.priority
            and o.arrival - s.arrival <= (s.request.priority - o.request.priority) * ageing
        ]
        assert s.preemptions <= len(within)
