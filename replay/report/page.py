"""From a result and its turns to one HTML file that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined

from bien.core.errors import UserError
from bien.replay.files import check_folder, spare, write_whole
from bien.replay.ladder import Ladder, Rung, ladder_path, read_ladder, rung_of
from bien.replay.metrics import Distribution
from bien.replay.report import figures
from bien.replay.report.timeline import Timeline, timelines
from bien.replay.report.words import clean, counted
from bien.replay.result import Cache, Card, Result, read_result
from bien.replay.say import say
from bien.replay.turns_file import TurnLine, read_turns, turns_path

SESSIONS = 24  # drawn one by one
SHOWN = 48  # in the drawing of all
ROWS = 80  # lanes of one session
CAUSES = 8  # of failed turns
CAUSE = 300  # characters
PERCENTILES = Distribution.__struct_fields__
KEY = {
    "ttft": "sent, no token yet (queue and prefill: TTFT)",
    "decode": "decode",
    "gap": "gap: tools, thinking",
    "agents": "waiting for sub-agents",
    "failed": "failed",
    "cut": "cut off",
}
ABOUT = {
    "ideal": "what an infinite cache would have had, in the order of this run; whole or not",
    "achieved": "what the workers had",
    "rounding": "lost: only whole blocks are kept, and the last token is always computed",
    "other_replica": "lost: another worker had it",
    "capacity": "lost: evicted, or sent before it was computed",
    "unknown": "lost: the server does not say on which worker",
    "new content": "nobody had sent it before",
}
MEASURED = ("coverage", "overload", "errors", "length_mismatch", "send_lag_ms", "loop_lag_ms")


def draw(result: Path, out: Path, records: Path | None = None) -> None:
    """Draw the run of a result.json. Its turns are in `records`, else beside it, if there are any.

    If a ladder.json beside it has it as a rung, the page has the ladder's curve.

    Raises:
        UserError: there is no such result, `records` are not its turns, or `out` is one of these files.
        ResourceError: `out` cannot be written.
    """
    if records is None and turns_path(result).exists():
        records = turns_path(result)
    spare(out, [result, ladder_path(result), *([records] if records else [])], "report")
    check_folder(out, "report")
    read = _read(result)
    turns = _turns(records, result, read) if records is not None else None
    ladder = _ladder(result, read)
    write_whole(out, render(read, turns, str(result), ladder).encode(), "report")
    say(f"written to {out}")


def render(
    result: Result,
    turns: Sequence[TurnLine] | None,
    source: str,
    ladder: tuple[Ladder, Rung] | None = None,
) -> str:
    """The page. Without `turns` it has no timelines and no histograms, and says so. `ladder`: the one that
    the run is a rung of, and which."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    text = resources.files("bien.replay.report").joinpath("page.html").read_text("utf-8")
    return environment.from_string(text).render(
        title=f"{result.kind} run: {result.card.model or 'a server'}, {result.card.corpus.source or 'trace'}",
        source=source,
        result=result,
        tiles=_tiles(result),
        causes=_causes(turns or ()),
        key=[(text, figures.COLOURS[name]) for name, text in KEY.items()],
        drawings=_drawings(result, turns),
        no_turns="The run has no turn." if turns is not None else "The turns of this run were not given.",
        percentiles=PERCENTILES,
        latency=list(_latency(result)),
        cache=list(_cache(result.cache)),
        ladder=_curve(*ladder) if ladder else None,
        card=_card(result.card),
        deployment=list(_flat(result.deployment)),
        number=number,
        share=share,
        exact=lambda value: "" if value is None else repr(value),
    )


def _read(path: Path) -> Result:
    try:
        return read_result(path)
    except UserError:
        try:
            rungs = read_ladder(path).rungs
        except UserError:
            pass
        else:
            names = ", ".join(rung.result for rung in rungs) or "none is finished"
            raise UserError(f"{path} is a ladder; valid: the result of one of its rungs ({names})") from None
        raise


def _turns(records: Path, path: Path, result: Result) -> list[TurnLine]:
    turns = read_turns(records, path)
    count = result.turns.count + result.turns.unfinished
    if len(turns) != count:
        raise UserError(f"{records} holds {len(turns)} turns of the {count} of {path}; valid: the whole file")
    return turns


def _ladder(path: Path, result: Result) -> tuple[Ladder, Rung] | None:
    try:
        ladder = read_ladder(ladder_path(path))
    except UserError:
        return None  # nobody asked for it
    rung = rung_of(ladder, path.name, result)
    return (ladder, rung) if rung else None


def _curve(ladder: Ladder, here: Rung) -> dict[str, Any]:
    return {
        "svg": figures.draw_ladder(ladder, here),
        "here": here.cap,
        "interrupted": ladder.interrupted,
        "rungs": [
            {
                "cap": rung.cap,
                "trees": rung.concurrency,
                "figures": [
                    rung.interactivity.p50,
                    rung.throughput.output,
                    rung.throughput.computed,
                    rung.throughput.logical,
                    rung.ttft_ms.p50,
                    rung.ttft_ms.p90,
                ],
                "hit": share(rung.cache_achieved),
                "mark": "efficient" if rung.efficient else "dominated" if rung.valid else "not valid",
            }
            for rung in ladder.rungs
        ],
    }


def _causes(turns: Sequence[TurnLine]) -> dict[str, Any]:
    counts = Counter(t.error[:CAUSE] for t in turns if t.error)
    most = counts.most_common(CAUSES)
    return {"most": most, "left": len(counts) - len(most)}


def number(value: float | None) -> str:
    """Four significant digits, thousands apart."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _drawings(result: Result, turns: Sequence[TurnLine] | None) -> dict[str, Any]:
    sessions = timelines(turns or ())
    chosen = sorted(sessions, key=lambda t: (-(len(t.lanes) > 1), -t.turns))[:SESSIONS]
    drawn = sessions[:SHOWN]
    return {
        "run": figures.draw_run(drawn) if drawn else "",
        "sessions_drawn": len(drawn),
        "sessions_left": len(sessions) - len(drawn),
        "sessions": [
            {"name": t.session, "about": _about(t), "svg": figures.draw_session(t, ROWS)} for t in chosen
        ],
        "distributions": figures.draw_distributions(turns, result.ttft_ms, result.tpot_ms) if turns else "",
        "cache": figures.draw_cache(result.cache) if figures.cache_parts(result.cache) else "",
    }


def _about(timeline: Timeline) -> str:
    agents = len(timeline.lanes) - 1
    whole = timeline.end - timeline.start
    parts = [counted(timeline.turns, "turn"), f"{whole:,.1f} s" if whole < 1000 else f"{whole / 60:,.0f} min"]
    if agents:
        parts.insert(1, counted(agents, "sub-agent"))
    if len(timeline.lanes) > ROWS:
        parts.append(f"the first {ROWS} streams")
    return ", ".join(parts)


def _tiles(result: Result) -> Iterator[dict[str, Any]]:
    jobs, through, sessions, tokens = result.jobs, result.throughput, result.sessions, result.tokens
    plain: list[tuple[str, float | None]] = [
        ("turns", result.turns.count),
        ("turns failed", result.turns.errors),
        ("turns cut off", result.turns.unfinished or None),
        ("sessions", sessions.count),
        ("sessions completed", sessions.completed),
        ("seconds", through.seconds),
        ("TTFT p50, ms", result.ttft_ms.p50),
        ("TPOT p50, ms", result.tpot_ms.p50),
        ("tokens/s of a request, p50", result.interactivity.p50),
        ("input and output tokens/s", through.logical),
        ("uncached and output tokens/s", through.computed),
        ("output tokens/s", through.output),
        ("output tokens/s per accelerator", through.per_accelerator.output),
        ("jobs per hour", jobs.per_hour),
        ("jobs per hour and user", jobs.per_hour_per_user),
        ("slowdown against alone", jobs.slowdown),
        ("input tokens", tokens.logical_input),
        ("of them cached", tokens.cached_input),
        ("output tokens", tokens.output),
        ("router parity", result.router.parity),
        ("imbalance of workers", result.router.imbalance),
        ("acceptance length", result.speculation.acceptance_length),
    ]
    shares = [("cache hit", result.cache.achieved), ("cache hit, ideal", result.cache.ideal)]
    for entries, text in ((plain, number), (shares, share)):
        for name, value in entries:
            if value is not None:
                yield {"name": name, "value": value, "text": text(value)}


def _latency(result: Result) -> Iterator[dict[str, Any]]:
    for id_, name, values in (
        ("ttft_ms", "TTFT ms", result.ttft_ms),
        ("tpot_ms", "TPOT ms", result.tpot_ms),
        ("itl_ms", "between tokens ms", result.itl_ms),
        ("e2e_ms", "end to end ms", result.e2e_ms),
        ("interactivity", "tokens/s of a request", result.interactivity),
        ("jobs", "job s", result.jobs.seconds),
    ):
        yield {"id": id_, "name": name, "figures": msgspec.structs.astuple(values)}


def _cache(cache: Cache) -> Iterator[dict[str, Any]]:
    parts = figures.cache_parts(cache)
    for name, value in [("ideal", cache.ideal), *parts] if parts else []:
        yield {
            "id": name.replace(" ", "_"),
            "name": name.replace("_", " "),
            "value": value,
            "about": ABOUT[name],
            "colour": figures.CACHE_COLOURS.get(name, "#fff"),
        }


def _card(card: Card) -> dict[str, list[tuple[str, str]]]:
    asked: list[tuple[str, str]] = []
    measured: list[tuple[str, str]] = []
    for name in Card.__struct_fields__:
        value = getattr(card, name)
        if isinstance(value, Distribution):
            measured.append((f"{name} p50, p99", f"{number(value.p50)}, {number(value.p99)}"))
        elif name in MEASURED:
            measured.append((name, share(value)))
        else:
            asked += _flat(msgspec.to_builtins(value), name)
    return {"asked": asked, "measured": measured}


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{at}[{i}]")
    elif value not in ({}, []):
        yield at, "-" if value is None else str(value)
