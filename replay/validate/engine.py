"""A whole replay predicted, then run: errors beside what live runs differ by among themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, stdev

import msgspec

from bien.core.deployment import Deployment
from bien.core.errors import BienError, UserError
from bien.core.plugins import PluginManager
from bien.replay.interval import figure, find_intervals
from bien.replay.live import Plan
from bien.replay.options import ReplayOptions
from bien.replay.result import Result, write_result
from bien.replay.run import run_once
from bien.replay.simulation import SimulationPlan, calibrated, simulate

SCHEMA = "bien.validation/1"
SPREADS = 2.0  # times what live runs differ by, an error may be, where that is more than the goal
BUSY = 0.7  # share of the time that workers must compute for a run to say something
RANKED = {"throughput.output": "output tokens/s", "interactivity.p50": "interactivity", "ttft_ms.p50": "TTFT"}


class Goal(msgspec.Struct, frozen=True):
    """A figure and what the prediction may be off by, as a share."""

    name: str
    path: str
    error: float


GOALS = (
    Goal("throughput", "throughput.output", 0.03),
    Goal("ITL mean", "itl_ms.mean", 0.05),
    Goal("end to end p50", "e2e_ms.p50", 0.05),
    Goal("end to end p99", "e2e_ms.p99", 0.10),
    Goal("TTFT p50", "ttft_ms.p50", 0.10),
    Goal("TTFT p99", "ttft_ms.p99", 0.15),
)


class Subject(msgspec.Struct, frozen=True):
    """A deployment and the calibration of its engine, made before any of the runs."""

    name: str
    deployment: Deployment
    calibration: Path


class Level(msgspec.Struct):
    """One load on one deployment. `live` has one result for each run, files beside it."""

    deployment: str
    concurrency: int
    predicted: dict[str, float | None]
    intervals: dict[str, tuple[float, float]]
    live: list[dict[str, float | None]]
    cached_predicted: int
    cached_live: list[int]
    evicted: bool  # live runs lost cached tokens for want of room
    utilisation: float | None

    def measured(self, path: str) -> float | None:
        """The median of the runs."""
        values = [v for run in self.live if (v := run.get(path)) is not None]
        return median(values) if values else None


class Judged(msgspec.Struct, frozen=True):
    """A goal at the level with several runs. `spread`: standard deviation of the runs over their mean."""

    name: str
    live: float
    predicted: float
    low: float | None
    high: float | None
    error: float
    spread: float
    allowed: float
    met: bool


class Validation(msgspec.Struct):
    schema: str
    levels: list[Level]
    judged: list[Judged]
    cached_exact: bool | None  # at every level, in every run, where nothing was evicted; None: nowhere so
    cached_points: float  # largest difference of hit rates elsewhere, in points
    kendall: dict[str, float | None]  # of all levels
    spearman: dict[str, float | None]
    configurations: int
    notes: list[str]


OnRun = Callable[[str], None]


def validate_engine(
    subjects: Sequence[Subject],
    concurrencies: Sequence[int],
    runs: int,
    traces: tuple[Path, ...],
    options: ReplayOptions,
    folder: Path,
    on_run: OnRun,
) -> Validation:
    """Predict every level first, then run them: the first deployment at the highest load `runs` times, the
    others once. Results are left in `folder`. BienError: a run could not be made."""
    manager = PluginManager.load()
    levels = []
    for subject in subjects:
        for n in concurrencies:
            levels.append(_predict(subject, n, traces, options, folder, manager, on_run))
    base = levels[len(concurrencies) - 1]
    of = {s.name: s for s in subjects}
    for level in levels:
        for i in range(runs if level is base else 1):
            _run(of[level.deployment], level, i, traces, options, folder, on_run)
    return judge(levels, base)


def judge(levels: list[Level], base: Level) -> Validation:
    """From levels that have run."""
    notes = []
    if base.utilisation is None or base.utilisation < BUSY:
        share = "unknown" if base.utilisation is None else f"{base.utilisation:.0%}"
        notes.append(
            f"workers were busy {share} of the time at concurrency {base.concurrency}; valid: {BUSY:.0%}"
        )
    judged = [j for goal in GOALS if (j := _judge(goal, base)) is not None]
    exact: bool | None = None
    points = 0.0
    for level in levels:
        for cached, run in zip(level.cached_live, level.live, strict=True):
            if not level.evicted:
                exact = exact is not False and cached == level.cached_predicted
            else:
                live, predicted = run["cache.achieved"] or 0.0, level.predicted["cache.achieved"] or 0.0
                points = max(points, 100 * abs(live - predicted))
    kendall, spearman = {}, {}
    for path in RANKED:
        kendall[path], spearman[path] = _ranks(levels, path)
    return Validation(SCHEMA, levels, judged, exact, points, kendall, spearman, len(levels), notes)


def _judge(goal: Goal, level: Level) -> Judged | None:
    values = [v for run in level.live if (v := run[goal.path]) is not None]
    predicted = level.predicted[goal.path]
    if not values or predicted is None:
        return None
    live = median(values)
    spread = stdev(values) / mean(values) if len(values) > 1 else 0.0
    error, allowed = predicted / live - 1, max(goal.error, SPREADS * spread)
    low, high = level.intervals.get(goal.path, (None, None))
    return Judged(goal.name, live, predicted, low, high, error, spread, allowed, abs(error) <= allowed)


def _ranks(levels: list[Level], path: str) -> tuple[float | None, float | None]:
    from scipy.stats import kendalltau, spearmanr

    pairs = [(p, m) for lv in levels if (p := lv.predicted[path]) is not None and (m := lv.measured(path))]
    if len(pairs) < 3:
        return None, None
    a, b = zip(*pairs, strict=True)
    return float(kendalltau(a, b).statistic), float(spearmanr(a, b).statistic)


def _predict(
    subject: Subject,
    concurrency: int,
    traces: tuple[Path, ...],
    options: ReplayOptions,
    folder: Path,
    manager: PluginManager,
    on_run: OnRun,
) -> Level:
    on_run(f"predicting {subject.name} at {concurrency}")
    deployment = calibrated(subject.deployment, subject.calibration)
    plan = SimulationPlan(traces, msgspec.structs.replace(options, concurrency=concurrency), deployment)
    result = simulate(plan, manager).result
    result.intervals = find_intervals(plan, result)
    write_result(folder / f"{subject.name}-{concurrency}-predicted.json", result)
    return Level(
        subject.name,
        concurrency,
        _figures(result),
        result.intervals,
        [],
        result.tokens.cached_input,
        [],
        False,
        None,
    )


def _run(
    subject: Subject,
    level: Level,
    number: int,
    traces: tuple[Path, ...],
    options: ReplayOptions,
    folder: Path,
    on_run: OnRun,
) -> None:
    on_run(f"running {subject.name} at {level.concurrency}" + (f", run {number + 1}" if number else ""))
    options = msgspec.structs.replace(options, concurrency=level.concurrency)
    path = folder / f"{subject.name}-{level.concurrency}-live-{number + 1}.json"
    result, interrupted = run_once(Plan(traces, options, path, deployment=subject.deployment))
    if interrupted or result is None:
        raise BienError("interrupted")
    if result.turns.errors:
        raise UserError(f"{result.turns.errors} turns of {path} failed; a prediction counts on all of them")
    level.live.append(_figures(result))
    level.cached_live.append(result.tokens.cached_input)
    level.evicted |= bool(result.cache.loss and result.cache.loss.capacity > 0)
    level.utilisation = result.router.utilisation


def _figures(result: Result) -> dict[str, float | None]:
    paths = [*(goal.path for goal in GOALS), *RANKED, "throughput.per_accelerator.output", "cache.achieved"]
    return {path: figure(result, path) for path in dict.fromkeys(paths)}
