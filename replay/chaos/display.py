"""The progress of `bien route chaos`, and its table."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bien.replay.chaos.case import Case, CaseReport, Verdict
from bien.replay.chaos.run import ChaosReport
from bien.replay.say import as_is

STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "not applicable": "dim"}


class ChaosProgress:
    """Use as a context manager."""

    def __init__(self, cases: int, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=cases)

    def __enter__(self) -> ChaosProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, case: Case, report: CaseReport | None) -> None:
        if report is None:
            self._bar.update(self._task, description=f"{case.number}  {case.name}")
            return
        line = as_is(f"{report.number:>3}  {report.name}: ")
        line.append(report.verdict, STYLES[report.verdict])
        line.append(f" ({report.seconds:.1f} s)")
        self._bar.console.print(line)
        self._bar.advance(self._task)


def print_report(report: ChaosReport, console: Console | None = None) -> None:
    """A row for each thing that was looked at."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("", justify="right")
    table.add_column("case", max_width=28)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was done, and must follow", ratio=3)
    table.add_column("seen", ratio=2)
    for case in report.cases:
        for i, check in enumerate(case.checks):
            head = (str(case.number), case.name) if not i else ("", "")
            verdict = "n/a" if check.verdict == "not applicable" else check.verdict
            table.add_row(
                *map(as_is, head),
                as_is(verdict, STYLES[check.verdict]),
                as_is(check.what),
                as_is(check.evidence),
            )
    console.print(table)
    counts = {name: sum(case.verdict == name for case in report.cases) for name in STYLES}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    failed = f": {', '.join(map(str, report.failed))}" if report.failed else ""
    style = "bold red" if report.failed else "bold green"
    text = f"\n{report.router}: {len(report.cases)} cases, {told}{failed}; {report.seconds:.0f} s"
    console.print(as_is(text, style), soft_wrap=True)
