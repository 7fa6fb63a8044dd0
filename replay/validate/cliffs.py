"""Published cliffs against simulated ones: the same trace at each concurrency of a published ladder, on what
the measured servers said of themselves, and where TTFT has its knee."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bien.core.errors import UserError, nearest
from bien.core.plugins import PluginManager
from bien.core.worker.apart import in_processes
from bien.replay.costs import PoolCosts
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from bien.replay.result import Result
from bien.replay.simulation import SimulationPlan, simulate
from bien.replay.traces import Survey, open_paths
from bien.replay.validate.cliff_arms import ARMS, Arm, Room
from bien.replay.validate.cliff_knee import RULE, TOLERANCE, knee, steps_apart
from bien.replay.validate.cliff_published import Published, Said

SCHEMA = "bien.cliffs/1"
GAP_CAP = 10.0  # seconds, of the measured replay
ADVANCE = (0.25, 0.75)  # parts of sessions at which its lanes began, caches warmed
DURATION = 3600.0  # seconds


class Simulated(msgspec.Struct, frozen=True):
    """One simulated point. Units as of `Published`; `output` and `itl_ms` are of the whole run, and of the
    median request. `hit` counts every tier."""

    concurrency: int
    ttft: float | None
    ttft_p90: float | None
    output: float | None
    itl_ms: float | None
    hit: float | None
    ideal: float | None
    turns: int
    errors: int
    sessions: int
    skipped: int  # sessions that are longer than the window
    seconds: float  # simulated


class Curve(msgspec.Struct):
    """One arm. `off`: steps of the grid between the knees; None: no knee was predicted on it.
    `drop`: the first concurrency at which output is less than at the step before."""

    name: str
    title: str
    accelerators: int
    source: str
    published: tuple[Published, ...]
    said: tuple[Said, ...]
    rooms: tuple[Room, ...]
    assumptions: tuple[str, ...]
    calibrated_on: int | None  # concurrency of the one published point that was used
    pace: float
    simulated: list[Simulated]
    costs: list[PoolCosts]
    knee_published: int
    knee_simulated: int | None
    off: int | None
    within: bool
    drop_published: int | None
    drop_simulated: int | None


class Cliffs(msgspec.Struct, kw_only=True):
    """What `bien validate cliffs` writes. Readers may rely on `schema` "bien.cliffs/1"."""

    schema: str = SCHEMA
    trace: str
    sessions: int | None  # None: all
    gap_cap: float
    share: float = 1.0  # of the room for tokens that memory and settings say, simulated
    rule: str = RULE
    tolerance: int = TOLERANCE
    curves: list[Curve] = []
    interrupted: bool = False


class Task(msgspec.Struct, frozen=True):
    """One simulation, as a process of its own gets it."""

    arm: str
    concurrency: int
    pace: float
    share: float
    traces: tuple[Path, ...]
    options: ReplayOptions


Notify = Callable[[str, int, int], None]
"""Name of the arm, concurrency, turns that have ended in that simulation."""


def arms_named(names: Sequence[str]) -> tuple[Arm, ...]:
    """All of them for none. UserError for a name that is none."""
    known = {arm.name: arm for arm in ARMS}
    for name in names:
        if name not in known:
            raise UserError(f"--arm is {name!r}; {nearest(name, known)}")
    return tuple(arm for arm in ARMS if not names or arm.name in names)


def run_cliffs(
    traces: tuple[Path, ...],
    arms: Sequence[Arm],
    sessions: int | None = None,
    jobs: int = 1,
    notify: Notify = lambda arm, concurrency, turns: None,
    share: float = 1.0,
) -> Cliffs:
    """Simulate every point of the arms' grids; `share`: of the caches' room, see `SESSIONS_SHARE`.

    Raises:
        BienError: the trace cannot be read.
    """
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; valid: 1 or more")
    options = ReplayOptions(
        gap_cap=GAP_CAP, sessions=sessions, open_loop=False, advance=ADVANCE, duration=DURATION
    ).check()
    Survey(open_paths(traces, PluginManager.load()), options).check()
    names = ", ".join(p.name for p in traces)
    found = Cliffs(trace=names, sessions=sessions, gap_cap=GAP_CAP, share=share)
    for arm in arms:
        done = _curve(arm, traces, options, jobs, notify, share)
        if done is None:
            found.interrupted = True
            break
        found.curves.append(done)
    return found


def _curve(
    arm: Arm, traces: tuple[Path, ...], options: ReplayOptions, jobs: int, notify: Notify, share: float
) -> Curve | None:
    pace = 1.0
    if arm.calibrate is not None:
        said = next(p.itl_ms for p in arm.points if p.concurrency == arm.calibrate)
        plain = _point(Task(arm.name, arm.calibrate, 1.0, share, traces, options), notify)
        if plain is None:
            return None
        predicted = plain[0].itl_ms
        if said is None or not predicted:
            raise UserError(f"{arm.name}: the sessions have no second token, by which the pace is set")
        pace = said / predicted
    tasks = [Task(arm.name, c, pace, share, traces, options) for c in arm.grid]
    points: list[Simulated] = []
    costs: list[PoolCosts] = []
    for done in _simulated(tasks, jobs, notify):
        if done is None:
            return None
        points.append(done[0])
        costs = done[1]
    points.sort(key=lambda p: p.concurrency)
    return curve_of(arm, points, pace, costs)


def curve_of(arm: Arm, points: list[Simulated], pace: float, costs: list[PoolCosts]) -> Curve:
    """The points beside the published ones, and the knees of both."""
    published = knee([(p.concurrency, p.ttft) for p in arm.points])
    if published is None:
        raise UserError(f"{arm.name}: the published curve has no knee")
    predicted = knee([(p.concurrency, p.ttft) for p in points])
    off = steps_apart(arm.grid, published, predicted)
    return Curve(
        arm.name,
        arm.title,
        arm.accelerators,
        arm.source,
        arm.points,
        arm.said,
        arm.rooms(),
        arm.assumptions,
        arm.calibrate,
        pace,
        points,
        costs,
        published,
        predicted,
        off,
        off is not None and abs(off) <= TOLERANCE,
        drop([(p.concurrency, p.output) for p in arm.points]),
        drop([(p.concurrency, p.output) for p in points]),
    )


def drop(curve: Sequence[tuple[int, float | None]]) -> int | None:
    """The concurrency after the one at which output is highest. None: it is highest at the end, or there is
    no figure before its highest."""
    known = [(c, value) for c, value in curve if value is not None]
    if not known:
        return None
    best = max(range(len(known)), key=lambda i: known[i][1])
    return None if best in (0, len(known) - 1) else known[best + 1][0]


def _simulated(
    tasks: Sequence[Task], jobs: int, notify: Notify
) -> Sequence[tuple[Simulated, list[PoolCosts]] | None]:
    if jobs == 1:
        found = []
        for task in tasks:
            found.append(_point(task, notify))
            if found[-1] is None:
                break
        return found
    found = []
    for number, last in in_processes(_point, tasks, jobs):
        found.append(last)
        task = tasks[number]
        notify(task.arm, task.concurrency, last[0].turns if last else 0)
    return found


def _point(
    task: Task, notify: Notify = lambda arm, concurrency, turns: None
) -> tuple[Simulated, list[PoolCosts]] | None:
    """None: interrupted."""
    arm = arms_named([task.arm])[0]
    options = msgspec.structs.replace(task.options, concurrency=task.concurrency)
    plan = SimulationPlan(task.traces, options, arm.deployment(task.concurrency, task.pace, task.share))

    def tick(driver: Driver) -> None:
        notify(task.arm, task.concurrency, driver.tally.turns)

    done = simulate(plan, PluginManager.load(), tick)
    if done.interrupted:
        return None
    return point_of(task.concurrency, done.result), done.result.costs


def point_of(concurrency: int, result: Result) -> Simulated:
    """What a result says in the terms of a published point."""

    def seconds(value: float | None) -> float | None:
        return None if value is None else value / 1e3

    return Simulated(
        concurrency,
        seconds(result.ttft_ms.p50),
        seconds(result.ttft_ms.p90),
        result.throughput.output,
        result.itl_ms.p50,
        result.cache.achieved,
        result.cache.ideal,
        result.turns.count,
        result.turns.errors,
        result.sessions.count,
        result.sessions.skipped,
        result.throughput.seconds,
    )
