"""A ladder: the same trace once per batch cap, with fresh caches each time; the rungs make a curve.

A rung's cap is `max_running` of every pool's scheduler, the most sequences that a worker runs at a time; a
pool with fewer slots gets as many. The load follows the cap: cap x workers session trees at a time, unless
a number of them is given. No step waits for a batch to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bien.core.compose import compose
from bien.core.deployment import Deployment, Selection
from bien.core.errors import DeploymentError, UserError
from bien.core.plugins import PluginManager
from bien.replay.files import check_folder, check_schema, pretty, write_whole
from bien.replay.metrics import Throughput
from bien.replay.options import ReplayOptions
from bien.replay.result import Result
from bien.replay.turns_file import turns_path

SCHEMA = "bien.ladder/1"
HIGHEST = 4096

RunRung = Callable[[Deployment, ReplayOptions, Path], tuple[Result | None, bool]]
"""Runs one rung and writes its result to the path: the result (None: nothing was measured), and whether it
was interrupted."""


class Percentiles(msgspec.Struct, frozen=True):
    """Null without a sample."""

    p50: float | None
    p90: float | None


class Rung(msgspec.Struct):
    """One run. `efficient`: no other valid rung is at least as good on both of the ladder's axes and better
    on one."""

    cap: int
    concurrency: int
    result: str  # file beside the ladder's
    interactivity: Percentiles  # tokens per second of a request
    throughput: Throughput  # per accelerator
    ttft_ms: Percentiles
    cache_achieved: float | None
    valid: bool
    reasons: list[str]
    notes: list[str]
    efficient: bool = False

    @property
    def point(self) -> tuple[float, float] | None:
        """Where it lies on the ladder's axes."""
        x, y = self.interactivity.p50, self.throughput.output
        return None if x is None or y is None else (x, y)


class Ladder(msgspec.Struct, kw_only=True):
    """`ladder.json`. Readers may rely on `schema` "bien.ladder/1"."""

    schema: str = SCHEMA
    kind: str  # "live" or "simulated"
    model: str
    workers: int
    accelerators: int
    axes: tuple[str, str] = ("interactivity.p50", "throughput.output")
    interrupted: bool = False
    rungs: list[Rung] = []  # finished ones, by cap


def parse_caps(text: str) -> tuple[int, ...]:
    """ "1,2,4" as caps in rising order. UserError for anything else."""
    try:
        caps = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        caps = ()
    if not caps or len(set(caps)) < len(caps) or not 1 <= caps[0] <= caps[-1] <= HIGHEST:
        raise UserError(
            f"--ladder is {text!r}; valid: batch caps from 1 to {HIGHEST}, each once, like 1,2,4,8,16"
        )
    return caps


def capped(deployment: Deployment, cap: int) -> Deployment:
    """The deployment of the rung `cap`."""
    pools = tuple(
        msgspec.structs.replace(
            pool,
            slots=max(pool.slots, cap),
            scheduler=Selection(pool.scheduler.use, {**pool.scheduler.parameters, "max_running": cap}),
        )
        for pool in deployment.pool
    )
    return msgspec.structs.replace(deployment, pool=pools)


def climb(
    caps: Sequence[int],
    deployment: Deployment,
    options: ReplayOptions,
    concurrency: int | None,
    json: Path,
    manager: PluginManager,
    run: RunRung,
    say: Callable[[str], None],
) -> Iterator[Ladder]:
    """Run rung after rung; the ladder so far, after each of them, written beside the result `json`.

    Raises:
        BienError: a cap or option is wrong (before anything runs), or a rung failed.
    """
    for remote in deployment.remote:
        raise UserError(
            f"--ladder sets how many requests a worker runs at a time, and those of pool {remote.name!r} are "
            "others' servers, which say that themselves; valid: pools without an engine, or --concurrency",
            field="ladder",
        )
    outputs = ladder_outputs(json, caps)
    workers = sum(pool.engines for pool in deployment.pool)
    rungs = []
    for cap in caps:
        trees = concurrency if concurrency is not None else cap * workers
        load = msgspec.structs.replace(options, concurrency=trees).check()
        rungs.append((cap, _composed(deployment, cap, manager), load, rung_path(json, cap)))
    for path, what in outputs:
        check_folder(path, what)
    ladder: Ladder | None = None
    for number, (cap, chosen, load, path) in enumerate(rungs, 1):
        trees = load.concurrency
        say(f"rung {number}/{len(rungs)}: at most {cap} running a worker, {_trees(trees)}")
        result, interrupted = run(chosen, load, path)
        if ladder is None and result is not None:
            accelerators = sum(pool.engines * pool.devices for pool in deployment.pool)
            ladder = Ladder(
                kind=result.kind, model=result.card.model, workers=workers, accelerators=accelerators
            )
        if ladder is None:
            return
        if interrupted:
            ladder.interrupted = True
        elif result is not None:
            ladder.rungs.append(_rung(cap, workers, load, path, result))
            mark(ladder.rungs)
        write_whole(ladder_path(json), pretty(ladder), "ladder")
        yield ladder
        if interrupted:
            return


def mark(rungs: Sequence[Rung]) -> None:
    """Set `efficient` of each."""
    points = {id(r): p for r in rungs if r.valid and (p := r.point) is not None}
    for rung in rungs:
        x, y = points.get(id(rung), (0.0, 0.0))
        rung.efficient = id(rung) in points and not any(
            a >= x and b >= y and (a, b) != (x, y) for a, b in points.values()
        )


def read_ladder(path: Path) -> Ladder:
    """UserError naming the file when it is no ladder of this schema."""
    try:
        data = path.read_bytes()
        check_schema(data, SCHEMA, path)
        return msgspec.json.decode(data, type=Ladder)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} is no ladder: {error}") from None


def rung_of(ladder: Ladder, name: str, result: Result) -> Rung | None:
    """The rung whose result is the file `name`, unless another run has been written there since."""
    for rung in ladder.rungs:
        if rung.result == name:
            p50, through = result.interactivity.p50, result.throughput.per_accelerator
            return rung if (rung.interactivity.p50, rung.throughput) == (p50, through) else None
    return None


def check_alone(url: str | None, report: Path | None) -> None:
    """UserError for options that make no sense with --ladder."""
    if url is not None:
        raise UserError("--ladder starts a deployment anew for each cap; it cannot do that at --url")
    if report is not None:
        raise UserError("--report draws one run; with --ladder, use `bien report` on the result of a rung")


def rung_path(json: Path, cap: int) -> Path:
    return json.with_name(f"{json.stem}-cap{cap}{json.suffix}")


def ladder_path(json: Path) -> Path:
    return json.with_name("ladder.json")


def plot_path(json: Path) -> Path:
    return json.with_name("ladder.png")


def ladder_outputs(json: Path, caps: Sequence[int]) -> list[tuple[Path, str]]:
    """Everything that a ladder writes, and what it is. UserError when `json` is a folder."""
    if not json.name or json.is_dir():
        raise UserError(f"--json is {str(json)!r}, a folder; valid: a file, the rungs' results get its name")
    made = [(ladder_path(json), "ladder"), (plot_path(json), "plot")]
    for cap in caps:
        path = rung_path(json, cap)
        made += [(path, "result"), (turns_path(path), "turns")]
    return made


def _composed(deployment: Deployment, cap: int, manager: PluginManager) -> Deployment:
    chosen = capped(deployment, cap)
    try:
        compose(chosen, manager)
    except DeploymentError as error:
        text = f"with scheduler.max_running = {cap}, as --ladder sets it for every pool: {error}"
        raise DeploymentError(text, field=error.field) from None
    return chosen


def _rung(cap: int, workers: int, load: ReplayOptions, path: Path, result: Result) -> Rung:
    notes = []
    if (trees := min(result.sessions.count, load.concurrency)) < cap * workers:
        text = f"{_trees(trees)} for {workers} x {cap} places: without sub-agents the cap cannot fill"
        notes.append(text)
    return Rung(
        cap=cap,
        concurrency=load.concurrency,
        result=path.name,
        interactivity=Percentiles(result.interactivity.p50, result.interactivity.p90),
        throughput=result.throughput.per_accelerator,
        ttft_ms=Percentiles(result.ttft_ms.p50, result.ttft_ms.p90),
        cache_achieved=result.cache.achieved,
        valid=result.validity.valid,
        reasons=list(result.validity.reasons),
        notes=notes,
    )


def _trees(count: int) -> str:
    return f"{count} session tree{'' if count == 1 else 's'} at a time"
