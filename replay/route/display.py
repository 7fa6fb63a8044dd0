"""The progress bar of `bien route explain`, and its tables."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from bien.core.errors import UserError
from bien.replay.report.words import counted
from bien.replay.route.report import Costliest, PolicyReport, RouteReport
from bien.replay.say import as_is, say

BEST = "bold green"
FIGURES = ("achieved", "", "imbalance", "ttft_ms.mean", "ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "regret")
HEADS = (
    *(
        "cache\nhit",
        "of\nideal",
        "imbal-\nance",
        "TTFT ms\nmean",
        "\np50",
        "\np90",
        "\np99",
        "regret\nof mean",
    ),
)
LOST = ("other\nreplica", "evicted", "gone", "rounding", "parity")


class RouteProgress:
    """Use as a context manager; the bar comes with the first `note`, so that what is wrong is said before."""

    def __init__(self, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("simulated turns"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._started = False
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> RouteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started:
            self._bar.stop()

    def note(self, done: int, of: int) -> None:
        if not self._started:
            self._started = True
            self._bar.start()
        self._bar.update(self._task, completed=done, total=of)
        self._bar.refresh()


def parse_ladder(text: str | None) -> tuple[int, ...]:
    """ "8,16" as numbers. UserError for anything else."""
    try:
        return tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise UserError(f"--ladder is {text!r}; valid: session trees at a time, like 8,16,64") from None


def print_report(report: RouteReport, console: Console | None = None) -> None:
    """What was simulated, a row for each policy (the best of each column in bold), loads, decisions."""
    console = console or Console()
    for name, text in _facts(report):
        console.print(Text.assemble((f"  {name:<10}", "bold"), as_is(text)), soft_wrap=True)
    console.print(_policies(report))
    console.print(as_is("\nlost of an infinite cache's hits, by cause", "bold"))
    console.print(_losses(report))
    if report.levels:
        console.print(as_is("\nTTFT p90 ms, by session trees at a time", "bold"))
        console.print(_levels(report))
    for name, policy in report.policies.items():
        if policy.costliest:
            console.print(as_is(f"\n{name}: the decisions that cost most", "bold"))
            for decision in policy.costliest:
                console.print(_decision(decision), soft_wrap=True)
    for note in report.notes:
        say(note, "yellow", console)
    if report.failed:
        say(f"failed: {', '.join(report.failed)}", "red", console)


def _facts(report: RouteReport) -> list[tuple[str, str]]:
    trace, oracle = report.trace, report.oracle
    skipped = f", {trace.skipped} longer ones left out" if trace.skipped else ""
    hit = next(p.infinite for p in report.policies.values() if p.infinite is not None)
    return [
        ("costs", _costs(report)),
        (
            "stack",
            f"{counted(report.workers, 'worker')} of {report.capacity:,} KV tokens, "
            f"{counted(report.concurrency, 'session tree')} at a time",
        ),
        (
            "trace",
            f"{counted(trace.sessions, 'session')}{skipped}, {counted(trace.turns, 'turn')}, "
            f"{trace.input_tokens / trace.turns:,.0f} prompt tokens each, "
            f"gaps of at most {report.gap_cap:g} s",
        ),
        ("ideal", f"{report.ideal:.1%} cache hit in one pool of all KV tokens, {hit:.1%} in an infinite one"),
        (
            "hindsight",
            f"TTFT mean {oracle.ttft_mean_ms:,.0f} ms ({oracle.by['ttft_mean_ms']}), "
            f"p90 {oracle.ttft_p90_ms:,.0f} ms ({oracle.by['ttft_p90_ms']}), "
            f"cache hit {oracle.hit:.1%} ({oracle.by['hit']}): the best found, not proved the best",
        ),
    ]


def _costs(report: RouteReport) -> str:
    executor = report.deployment["pool"][0]["executor"]
    constants = ", ".join(f"{name} {value}" for name, value in executor["parameters"].items())
    text = "; ".join(costs.text for costs in report.costs)
    return text if any(costs.machine for costs in report.costs) else f"{text}: {constants or 'defaults'}"


def _policies(report: RouteReport) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for head in HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for name, policy in _in_order(report):
        cells = []
        for figure, text in zip(FIGURES, _row(policy), strict=True):
            best = name in report.best.get(figure, ())
            cells.append(Text(f"{text}*" if best else f"{text} ", BEST if best else ""))
        table.add_row(as_is(name), *cells)
    return table


def _in_order(report: RouteReport) -> list[tuple[str, PolicyReport]]:
    def mean(item: tuple[str, PolicyReport]) -> float:
        return float("inf") if item[1].ttft_ms.mean is None else item[1].ttft_ms.mean

    return sorted(report.policies.items(), key=mean)


def _row(policy: PolicyReport) -> list[str]:
    ttft, achieved = policy.ttft_ms, policy.achieved
    return [
        "failed" if achieved is None else f"{achieved:.1%}",
        f"{achieved / policy.ideal:.3f}" if policy.ideal and achieved is not None else "-",
        _number(policy.imbalance, 2),
        *(_number(value, 0) for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)),
        "-" if policy.regret is None else f"{policy.regret:+.1%}",
    ]


def _losses(report: RouteReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    for head in LOST:
        table.add_column(head, justify="right", no_wrap=True)
    for name, policy in _in_order(report):
        if (loss := policy.loss) is None:
            continue
        shares = (loss.other_replica, loss.evicted, loss.gone, loss.rounding)
        table.add_row(as_is(name), *(f"{share:.2%}" for share in shares), _number(policy.parity, 3))
    return table


def _levels(report: RouteReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    for level in report.levels:
        table.add_column(f"{level.concurrency:,}", justify="right", no_wrap=True)
    for name in report.policies:
        cells = []
        for level in report.levels:
            values = [round(p.ttft_ms.p90) for p in level.policies.values() if p.ttft_ms.p90 is not None]
            p90 = level.policies[name].ttft_ms.p90
            best = p90 is not None and round(p90) == min(values)
            text = "failed" if level.policies[name].achieved is None else _number(p90, 0)
            cells.append(Text(text + ("*" if best else " "), BEST if best else ""))
        table.add_row(as_is(name), *cells)
    return table


def _decision(d: Costliest) -> Text:
    told = {k: f"{v:,.1f}" if isinstance(v, float) else str(v) for k, v in d.reasons.items() if v != 0}
    reasons = ", ".join(f"{name} {value}" for name, value in told.items())
    lines = [
        ("bold", f"  {d.id}  "),
        ("", f"TTFT {d.ttft_ms:,.0f} ms; hindsight: {d.oracle_ttft_ms:,.0f} ms on {d.oracle_worker}\n"),
        (
            "",
            f"    prompt {d.prompt_tokens:,}: {d.cached:,} cached on {d.worker} ({d.predicted:,} predicted), "
            f"{d.queued_tokens:,} queued ahead; {_held(d)}; an infinite cache had {d.infinite:,}\n",
        ),
    ]
    if reasons:
        lines.append(("", f"    reasons: {reasons}\n"))
    return Text.assemble(*(as_is(text, style) for style, text in lines))


def _held(d: Costliest) -> str:
    if d.held <= d.cached:
        return "no worker held more"
    return f"{d.holder} held {d.held:,} behind {d.holder_queued:,} queued"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
