"""The policies as a PNG: cache hits against TTFT, and TTFT over load where there are several loads."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bien.replay.files import write_whole
from bien.replay.report.words import plain
from bien.replay.route.report import RouteReport

COLOURS = ("#2c6fb3", "#d1772c", "#3f8f4f", "#b3402c", "#7a5aa6", "#8a6d4b", "#c763a5", "#5f6b76", "#a39a2a")
MARKS = "osD^vPXd*"
SOFT = "#7a7a7a"


def write_plot(path: Path, report: RouteReport) -> None:
    """Draw it with matplotlib, which is imported now.

    Raises:
        ResourceError: the folder cannot be written to.
    """
    from matplotlib.figure import Figure

    panels = 2 if len(report.levels) > 1 else 1
    figure = Figure(figsize=(5.6 * panels + 2.0, 5.0), dpi=140, layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    draw_policies(axes[0], report)
    if panels == 2:
        draw_levels(axes[1], report)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_whole(path, data.getvalue(), "plot")


def draw_policies(axes: Any, report: RouteReport) -> None:
    """Right and down is better."""
    for number, (name, policy) in enumerate(report.policies.items()):
        p90 = policy.ttft_ms.p90
        if p90 is not None and policy.achieved is not None and report.ideal:
            _point(axes, number, policy.achieved / report.ideal, p90 / 1e3, plain(name))
    oracle = report.oracle
    axes.axhline(
        oracle.ttft_p90_ms / 1e3, color=SOFT, lw=1, ls="--", zorder=1, label="best found in hindsight"
    )
    axes.axvline(1.0, color=SOFT, lw=1, ls=":", zorder=1, label="one pool of all cache")
    _seconds(axes)
    axes.set_xlabel("cache hit / hit of one pool of the same size")
    title = f"{report.workers} workers of {report.capacity:,} KV tokens, {report.concurrency} session trees"
    _finish(axes, title)


def draw_levels(axes: Any, report: RouteReport) -> None:
    """A line for each policy."""
    trees = [level.concurrency for level in report.levels]
    for number, name in enumerate(report.policies):
        p90 = [level.policies[name].ttft_ms.p90 for level in report.levels]
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        values = [float("nan") if v is None else v / 1e3 for v in p90]
        axes.plot(trees, values, color=colour, marker=mark, ms=6, lw=1.5, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(trees, [f"{n:,}" for n in trees])
    axes.minorticks_off()
    _seconds(axes)
    axes.set_xlabel("session trees at a time")
    _finish(axes, "the same workers, other loads")


def _seconds(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(LogLocator(10, ()))
    axes.set_ylabel("TTFT p90, s")


def _point(axes: Any, number: int, x: float, y: float, name: str) -> None:
    colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
    axes.scatter([x], [y], s=64, color=colour, marker=mark, zorder=3, label=name)


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.grid(color="#e4e7eb", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
