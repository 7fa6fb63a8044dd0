"""The table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bien.replay.metrics import Distribution
from bien.replay.result import Result
from bien.replay.say import as_is, say


def print_summary(result: Result, console: Console | None = None) -> None:
    """Everything a reader looks at first; the rest is in result.json."""
    console = console or Console()
    console.print(_facts_grid(result))
    console.print(_distributions(result))
    for reason in result.validity.reasons:
        say(f"not valid: {reason}", "yellow", console)


def _distributions(result: Result) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("", style="bold")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for name, values, digits in (
        ("TTFT ms", result.ttft_ms, 0),
        ("TPOT ms", result.tpot_ms, 1),
        ("end to end ms", result.e2e_ms, 0),
        ("tokens/s of a request", result.interactivity, 1),
        ("job s", result.jobs.seconds, 1),
    ):
        table.add_row(name, *_row(values, digits))
    return table


def _facts_grid(result: Result) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, text in _facts(result):
        grid.add_row(f"  {name}", as_is(text))
    return grid


def _row(values: Distribution, digits: int) -> list[str]:
    return [_number(v, digits) for v in (values.mean, values.p50, values.p90, values.p95, values.p99)]


def _facts(result: Result) -> list[tuple[str, str]]:
    sessions, turns, tokens, cache = result.sessions, result.turns, result.tokens, result.cache
    through, jobs, router = result.throughput, result.jobs, result.router
    loss, fidelity = cache.loss, result.fidelity
    facts = [
        *(
            ("costs", f"{costs.text}" + f" (pool {costs.pool!r})" * (len(result.costs) > 1))
            for costs in result.costs
        ),
        *_intervals(result),
        ("run", f"{result.kind}, {result.card.model}, {_number(through.seconds, 1)} s"),
        (
            "sessions",
            f"{sessions.completed}/{sessions.count}"
            + _also(skipped=sessions.skipped, failed=sessions.failed),
        ),
        ("turns", f"{turns.count}" + _also(errors=turns.errors, unfinished=turns.unfinished)),
        ("tokens", f"{tokens.logical_input} in ({tokens.cached_input} cached), {tokens.output} out"),
        (
            "tokens/s",
            f"{_number(through.logical, 1)} logical, {_number(through.computed, 1)} computed, "
            f"{_number(through.output, 1)} output",
        ),
        ("cache hit", f"{_share(cache.achieved)} of {_share(cache.ideal)} ideal"),
    ]
    if loss:
        parts = {n: getattr(loss, n) for n in loss.__struct_fields__}
        facts.append(("cache loss", ", ".join(f"{n.replace('_', ' ')} {v:.1%}" for n, v in parts.items())))
    facts += [
        ("jobs", f"{jobs.count}, {_number(jobs.per_hour, 1)} an hour" + _slowdown(jobs.slowdown)),
        (
            "router",
            f"parity {_number(router.parity, 3)}, imbalance {_number(router.imbalance, 2)}, "
            f"workers busy {_share(router.utilisation)}",
        ),
        (
            "fidelity",
            f"{fidelity.turns:.1%} of turns, {fidelity.tokens:.1%} of tokens, {fidelity.reuse:.1%} of reuse"
            + "".join(f"; {note}" for note in fidelity.notes),
        ),
    ]
    return facts


def _intervals(result: Result) -> list[tuple[str, str]]:
    parts = [
        f"{name} {found[0]:,.{digits}f}-{found[1]:,.{digits}f}"
        for name, path, digits in (
            ("TTFT p50 ms", "ttft_ms.p50", 0),
            ("TPOT p50 ms", "tpot_ms.p50", 1),
            ("end to end p50 ms", "e2e_ms.p50", 0),
            ("output tokens/s", "throughput.output", 1),
        )
        if (found := result.intervals.get(path))
    ]
    return [("as costs may be", ", ".join(parts))] if parts else []


def _slowdown(value: float | None) -> str:
    return "" if value is None else f", waiting {value:.2f} times as long as alone"


def _also(**counts: int) -> str:
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    return f" ({', '.join(parts)})" if parts else ""


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
