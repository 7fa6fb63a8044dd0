"""Classes of urgency: who goes first, who gives way, and for how long."""

from __future__ import annotations

import random

import pytest

from bien.core.compose import compose
from bien.core.deployment import parse_deployment
from bien.core.errors import DeploymentError
from bien.core.plugins import PluginManager
from bien.core.sequence import Sequence
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
