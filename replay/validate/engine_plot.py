"""Interactivity against throughput over a ladder of loads, live beside predicted with intervals, as a PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bien.replay.files import write_whole
from bien.replay.validate.engine import Level, Validation

COLOURS = ("#2c6fb3", "#c2572b", "#3d8a5f", "#7a5ba6")
X, Y = "interactivity.p50", "throughput.per_accelerator.output"


def write_plot(path: Path, found: Validation) -> None:
    """ResourceError: the folder cannot be written to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 5.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(level.deployment for level in found.levels))
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        _curve(axes, name, [v for v in found.levels if v.deployment == name], colour)
    axes.set_xlabel("interactivity: tokens/s of a request, median")
    axes.set_ylabel("output tokens/s per accelerator")
    axes.set_title("Measured and predicted over the number of sessions at a time", loc="left", fontsize=11)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color="#e4e7eb", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=1, edgecolor="#c4cad1")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_whole(path, data.getvalue(), "plot")


def _curve(axes: Any, name: str, levels: list[Level], colour: str) -> None:
    live = [(x, y) for v in levels if (x := v.measured(X)) is not None and (y := v.measured(Y)) is not None]
    axes.plot(*zip(*live, strict=True), "o-", color=colour, lw=1.6, ms=6, zorder=4, label=f"{name}, measured")
    for v in levels:
        for run in v.live if len(v.live) > 1 else ():
            axes.plot(run[X], run[Y], ".", color=colour, ms=3, alpha=0.6, zorder=4)
    predicted = [(v.predicted[X], v.predicted[Y], v) for v in levels]
    known = [(x, y, v) for x, y, v in predicted if x is not None and y is not None]
    axes.errorbar(
        [p[0] for p in known],
        [p[1] for p in known],
        xerr=_reach(known, X, 0),
        yerr=_reach(known, Y, 1),
        fmt="D",
        ls=(0, (4, 3)),
        lw=1.2,
        ms=6,
        mfc="white",
        color=colour,
        ecolor=colour,
        elinewidth=0.9,
        capsize=2,
        alpha=0.85,
        zorder=3,
        label=f"{name}, predicted",
    )
    for px, py, v in known:
        axes.annotate(
            str(v.concurrency), (px, py), (7, 7), textcoords="offset points", fontsize=8, color=colour
        )


def _reach(known: list[tuple[float, float, Level]], path: str, at: int) -> list[list[float]]:
    low, high = [], []
    for point in known:
        value = point[at]
        ends = point[2].intervals.get(path, (value, value))
        low.append(max(0.0, value - ends[0]))  # type: ignore[operator]
        high.append(max(0.0, ends[1] - value))  # type: ignore[operator]
    return [low, high]
