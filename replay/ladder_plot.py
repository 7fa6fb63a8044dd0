"""The ladder's curve as a PNG: interactivity against throughput, one point a rung, labelled with its cap."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

from bien.replay.files import write_whole
from bien.replay.ladder import Ladder, Rung
from bien.replay.report.words import clean

NEAR = 0.025  # of an axis: rungs this close share a label
LONG = 7  # characters of a label
COLOUR = "#2c6fb3"
SOFT = "#7a7a7a"


def write_plot(path: Path, ladder: Ladder) -> None:
    """Draw it with matplotlib, which is imported now.

    Raises:
        ResourceError: the folder cannot be written to.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.0), dpi=150, layout="constrained")
    draw_curve(figure.add_subplot(), ladder)
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a name: a box
        figure.savefig(data, format="png")
    write_whole(path, data.getvalue(), "plot")


def labels(rungs: list[Rung]) -> list[tuple[float, float, str]]:
    """Where to write which caps: rungs that lie together share one text."""
    points = [(p, r.cap) for r in rungs if (p := r.point) is not None]
    width = max((p[0] for p, _ in points), default=0.0) or 1.0
    height = max((p[1] for p, _ in points), default=0.0) or 1.0
    groups: list[tuple[tuple[float, float], list[int]]] = []
    for p, cap in points:
        for at, caps in groups:
            if abs(p[0] - at[0]) <= NEAR * width and abs(p[1] - at[1]) <= NEAR * height:
                caps.append(cap)
                break
        else:
            groups.append((p, [cap]))
    return [(x, y, ", ".join(map(str, caps))) for (x, y), caps in groups]


def draw_curve(axes: Any, ladder: Ladder) -> None:
    """On matplotlib axes."""
    placed = [(p, r) for r in ladder.rungs if (p := r.point) is not None]
    frontier = sorted(p for p, r in placed if r.efficient)
    if frontier:
        axes.plot(*zip(*frontier, strict=True), color=COLOUR, lw=1.5, zorder=2)
    kinds = (
        ("Pareto-efficient", "o", COLOUR, COLOUR, [p for p, r in placed if r.efficient]),
        ("dominated", "o", "white", COLOUR, [p for p, r in placed if r.valid and not r.efficient]),
        ("not valid", "X", SOFT, SOFT, [p for p, r in placed if not r.valid]),
    )
    for name, marker, face, edge, points in kinds:
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=48, marker=marker, facecolor=face, edgecolor=edge, zorder=3, label=name)
    width = 1.12 * max((p[0] for p, _ in placed), default=1.0) or 1.0
    height = 1.15 * max((p[1] for p, _ in placed), default=1.0) or 1.0
    for right, up, text in labels(ladder.rungs):
        # The frontier falls to the right, so that is where there is room; a long label would leave the axes.
        left = len(text) > LONG and right > width / 2
        axes.annotate(
            text,
            (right, up),
            xytext=(-7 if left else 7, 6),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=10,
        )
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_xlabel("interactivity: tokens/s of a request, median")
    axes.set_ylabel("output tokens/s per accelerator")
    count = f"{ladder.workers} worker{'s' if ladder.workers > 1 else ''}"
    title = f"{clean(ladder.model)}, {ladder.kind}, {count}; labels: batch cap of a worker"
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.grid(color="#e4e7eb", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    if placed:
        axes.legend(framealpha=1, edgecolor="#c4cad1", loc="lower left")  # a frame: its marks are no points
