"""The table of `bien validate published`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bien.replay.report.words import clean, counted
from bien.replay.validate.published import Errors, Outcome

NAMES = {"tpot": "TPOT", "ttft": "TTFT"}


def print_outcome(outcome: Outcome, console: Console | None = None) -> None:
    """Uncalibrated first; then every group, and what was left out and why."""
    console = console or Console()

    def say(text: str, style: str = "") -> None:
        console.print(Text(clean(text), style), soft_wrap=True)

    plain, fitted = outcome.median_error_uncalibrated, outcome.median_error
    say("median |predicted / measured - 1|, known models and gpus", "bold")
    say("uncalibrated: " + ", ".join(f"{NAMES[t]} {_share(plain[t])}" for t in NAMES))
    if outcome.calibrate:
        say(
            f"calibrated on at most {counted(outcome.calibrate, 'point')} of a group, errors of the others: "
            + ", ".join(f"{NAMES[t]} {_share(fitted[t])} (goal {outcome.goals[t]:.0%})" for t in NAMES)
        )
        for mode, found in outcome.by_mode.items():
            if found["tpot"].points:
                say(f"  {mode}: " + ", ".join(_both(NAMES[t], found[t]) for t in NAMES))
        middle, within = outcome.median_of_groups, outcome.groups_within_goal
        say(
            "  median of the groups' medians: "
            + ", ".join(
                f"{NAMES[t]} {_share(middle[t])} (in the goal: {within[t]} of {outcome.groups_calibrated})"
                for t in NAMES
            )
        )
        say("  90 % intervals held " + ", ".join(f"{NAMES[t]} {_share(outcome.covered[t])}" for t in NAMES))
        if outcome.stand_ins["tpot"].points:
            say("  unknown model or gpu: " + ", ".join(_both(NAMES[t], outcome.stand_ins[t]) for t in NAMES))
    for mode, noises in outcome.noise.items():
        if noises["tpot"].configurations:
            say(
                f"repeats of {counted(noises['tpot'].configurations, 'configuration')} ({mode}) deviate by "
                + ", ".join(
                    f"{NAMES[t]} {_share(n.median)} in the median, {_share(n.p90)} at p90"
                    for t, n in noises.items()
                )
            )
    console.print(_groups(outcome))
    say(f"{counted(outcome.rows, 'row')}; {outcome.copies:,} repeat another one to the digit")
    for reasons, how in ((outcome.dropped, "dropped"), (outcome.unpredicted, "not predicted")):
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
            say(f"{counted(count, 'row')} {how}: {reason}", "yellow")


def _groups(outcome: Outcome) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("group", style="bold", min_width=34)
    for name in ("points", "fit", "TPOT plain", "fitted", "TTFT plain", "fitted"):
        table.add_column(name, justify="right", no_wrap=True)
    for g in outcome.groups:
        names = (g.model.split("/")[-1], g.gpu, g.framework, g.precision, g.mode)
        table.add_row(
            Text(clean(" ".join(n for n in names if n) + ("" if g.known else " (stand-in)"))),
            str(g.points),
            str(len(g.calibrated_on)) if g.calibrated_on or not g.why_not else "-",
            _share(g.tpot.uncalibrated),
            _goal(g.tpot.calibrated, outcome.goals["tpot"]),
            _share(g.ttft.uncalibrated),
            _goal(g.ttft.calibrated, outcome.goals["ttft"]),
        )
    return table


def _both(name: str, e: Errors) -> str:
    return f"{name} {_share(e.uncalibrated)} -> {_share(e.calibrated)}"


def _goal(value: float | None, goal: float) -> Text:
    return Text(_share(value), "yellow" if value is not None and value > goal else "")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
