"""Conformance suite of schedulers. Subclass it in your tests and give `build`:

class TestMine(SchedulerSuite):
    def build(self):
        return MyScheduler(MyConfig())
"""

from __future__ import annotations

import gc
import random

import msgspec

from bien.core.scheduler import Scheduler
from bien.core.sequence import Sequence
from bien.core.testing.fake_engine import FakeEngine, Room


class Arrival(msgspec.Struct, frozen=True):
    """A request: submitted before step `step`; `stop`: ends by itself at so many tokens (0: `output`);
    `abort`: the client leaves before that step (0: stays)."""

    step: int
    prompt: int
    output: int
    stop: int = 0
    abort: int = 0


class Scenario(msgspec.Struct, frozen=True):
    """One machine, its requests, and a seed for what the machine does at random."""

    room: Room = Room()
    arrivals: tuple[Arrival, ...] = ()
    seed: int = 0


def run(scheduler: Scheduler, scenario: Scenario, limit: int = 5000) -> FakeEngine:
    """Run a scenario until every request has ended; AssertionError names what broke the contract."""
    engine = FakeEngine(scheduler, scenario.room, scenario.seed)
    coming = sorted(scenario.arrivals, key=lambda a: a.step)
    leaving: list[tuple[int, str]] = []
    for step in range(limit):
        while coming and coming[0].step <= step:
            a = coming.pop(0)
            id = engine.submit(a.prompt, a.output, a.stop)
            if a.abort:
                leaving.append((max(a.abort, step), id))
        for at, id in leaving:
            if at == step:
                engine.abort(id)
        if not coming and not engine.busy:
            return engine
        engine.step()
    raise AssertionError(f"{', '.join(engine.live)} did not end within {limit} steps")


def random_scenario(rng: random.Random) -> Scenario:
    """Small machines under more requests than they hold."""
    size = rng.choice([1, 2, 4])
    room = Room(
        slots=rng.randint(1, 5),
        blocks=rng.randint(8, 30),
        block_tokens=size,
        depth=rng.choice([1, 1, 2]),
        boundary=rng.choice([0, 0, size, 2 * size]),
        load_polls=rng.choice([0, 0, 3]),
        drafts=rng.choice([0, 0, 3]),
    )
    most = room.blocks * size
    arrivals = []
    for _ in range(rng.randint(1, 12)):
        prompt = rng.randint(1, most - 1)
        output = rng.randint(1, min(40, most - prompt))
        step = rng.randint(0, 30)
        stop = rng.randint(1, output) if rng.random() < 0.3 else 0
        abort = step + rng.randint(1, 30) if rng.random() < 0.2 else 0
        arrivals.append(Arrival(step, prompt, output, stop, abort))
    return Scenario(room, tuple(arrivals), rng.getrandbits(32))


class SchedulerSuite:
    """What every scheduler must do, whatever its policy."""

    rounds = 60
    """Random scenarios per test."""

    def build(self) -> Scheduler:
        """A fresh scheduler. Every call must return an equal one."""
        raise NotImplementedError("a suite needs `def build(self): return <your scheduler>`")

    def test_idle_plans_nothing(self) -> None:
        scheduler = self.build()
        engine = FakeEngine(scheduler, Room())
        assert not scheduler.plan(engine).items, "a scheduler without sequences must return an empty plan"
        scheduler.close()

    def test_one_request_runs_alone(self) -> None:
        for prompt, output in ((1, 1), (1, 9), (100, 1), (64, 64)):
            engine = run(self.build(), Scenario(Room(), (Arrival(0, prompt, output),)))
            assert engine.finished == ["r0"]

    def test_every_request_ends(self) -> None:
        """Plans are legal and nobody starves, under arrivals, stops and shortage at random."""
        self._rounds(1, Room())

    def test_shortage_is_met_by_preemption(self) -> None:
        """Prompts fit together, outputs do not: someone must give way, come back, and end."""
        room = Room(slots=4, blocks=10, block_tokens=2)
        arrivals = tuple(Arrival(0, 2, 17) for _ in range(4))
        engine = run(self.build(), Scenario(room, arrivals))
        assert len(engine.finished) == 4

    def test_aborts_at_any_moment(self) -> None:
        rng = random.Random(2)
        for _ in range(self.rounds):
            made = random_scenario(rng)
            gone = [
                msgspec.structs.replace(a, abort=a.step + rng.randint(0, 12)) if rng.random() < 0.7 else a
                for a in made.arrivals
            ]
            self._run(msgspec.structs.replace(made, arrivals=tuple(gone)))

    def test_forgets_what_has_ended(self) -> None:
        """A worker runs for months: a sequence (and its content) must go when it has been removed."""
        scheduler = self.build()
        scenario = Scenario(Room(slots=3), tuple(Arrival(i, 5, 4, abort=i % 3) for i in range(40)))
        gc.collect()
        before = _sequences()
        run(scheduler, scenario)
        gc.collect()
        kept = _sequences() - before
        assert kept <= 3, f"40 sequences have ended, and {kept} are still referred to"
        scheduler.close()

    def test_chunks_respect_the_view(self) -> None:
        self._rounds(3, Room(boundary=3))

    def test_loading_sequences_are_left_alone(self) -> None:
        self._rounds(4, Room(load_polls=4))

    def test_drafts_ride_behind_the_whole_of_pending(self) -> None:
        self._rounds(5, Room(drafts=4))

    def test_drafts_starve_nobody(self) -> None:
        """However many there are, each sequence that decodes has its token first."""
        room = Room(slots=4, blocks=1000, block_tokens=100, drafts=20_000)
        self._run(Scenario(room, tuple(Arrival(0, 1, 20_000, stop=40) for _ in range(4))))

    def test_two_steps_in_flight(self) -> None:
        self._rounds(6, Room(depth=2))

    def test_a_chunk_of_nothing_waits(self) -> None:
        self._rounds(9, Room(depth=2, narrow=True))

    def test_stationary_means_that_plans_repeat(self) -> None:
        self._rounds(7, Room(depth=1, blocks=1000))

    def test_equal_calls_give_equal_plans(self) -> None:
        """Simulation and live runs are compared plan by plan."""
        rng = random.Random(8)
        for _ in range(self.rounds // 4):
            scenario = random_scenario(rng)
            assert self._run(scenario).log == self._run(scenario).log, (
                f"two runs of one scenario were planned differently: {scenario}"
            )

    def _rounds(self, seed: int, fixed: Room) -> None:
        """Random scenarios, with the fields of `fixed` that differ from the default held."""
        held = {f: v for f, v in msgspec.structs.asdict(fixed).items() if v != getattr(Room(), f)}
        rng = random.Random(seed)
        for _ in range(self.rounds):
            made = random_scenario(rng)
            self._run(msgspec.structs.replace(made, room=msgspec.structs.replace(made.room, **held)))

    def _run(self, scenario: Scenario) -> FakeEngine:
        scheduler = self.build()
        try:
            engine = run(scheduler, scenario)
        except AssertionError:
            self._report(scenario)
            raise
        scheduler.close()
        return engine

    def _report(self, scenario: Scenario) -> None:
        """Raise what a scenario breaks, with as few of its requests as still break something."""
        text, kept = "", scenario.arrivals
        for arrival in (None, *kept):
            fewer = tuple(a for a in kept if a is not arrival)
            tried = msgspec.structs.replace(scenario, arrivals=fewer)
            try:
                run(self.build(), tried)
            except AssertionError as error:
                text, kept, scenario = str(error), fewer, tried
        if text:
            raise AssertionError(f"{text}; in {scenario}") from None


def _sequences() -> int:
    return sum(type(thing) is Sequence for thing in gc.get_objects())
