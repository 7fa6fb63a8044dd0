"""TTFT and cache hits over concurrency as a PNG: a column for each published curve, simulated beside
published, the knee of each marked."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bien.replay.files import write_whole
from bien.replay.validate.cliffs import Cliffs, Curve

SIMULATED, PUBLISHED, IDEAL = "#2c6fb3", "#b3622c", "#7a7a7a"
GRID = "#e4e7eb"
FACES = {"published": PUBLISHED, "simulated": SIMULATED}


def write_plot(path: Path, found: Cliffs) -> None:
    """Draw it with matplotlib, which is imported now.

    Raises:
        ResourceError: the folder cannot be written to.
    """
    from matplotlib.figure import Figure

    curves = found.curves
    figure = Figure(figsize=(1.2 + 4.4 * max(1, len(curves)), 7.0), dpi=130, layout="constrained")
    grid: Any = figure.subplots(2, max(1, len(curves)), squeeze=False, height_ratios=(3, 2))
    low, high = _range(curves)
    for column, curve in enumerate(curves):
        upper, lower = grid[0][column], grid[1][column]
        _ttft(upper, curve)
        upper.set_ylim(low, high)
        _hit(lower, curve)
        for axes in (upper, lower):
            _frame(axes, curve)
        upper.tick_params(labelbottom=False)
        lower.set_xlabel("session trees at a time")
    if curves:
        grid[0][0].set_ylabel("TTFT p50, seconds")
        grid[1][0].set_ylabel("prompt tokens found in the cache")
        handles, names = grid[0][0].get_legend_handles_labels()
        more, others = grid[1][0].get_legend_handles_labels()
        known = dict(zip([*names, *others], [*handles, *more], strict=True))
        columns = len(known) if len(curves) > 1 else 2
        figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=columns, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_whole(path, data.getvalue(), "plot")


def _ttft(axes: Any, curve: Curve) -> None:
    axes.set_yscale("log")
    x = {c: i for i, c in enumerate(_grid(curve))}
    said = [(x[p.concurrency], p.ttft) for p in curve.published if p.ttft is not None and not p.at_most]
    bound = [(x[p.concurrency], p.ttft) for p in curve.published if p.ttft is not None and p.at_most]
    found = [(x[p.concurrency], p.ttft) for p in curve.simulated if p.ttft is not None]
    tail = [(x[p.concurrency], p.ttft_p90) for p in curve.simulated if p.ttft_p90 is not None]
    if len(tail) == len(found) and found:
        axes.fill_between(
            [i for i, _ in found],
            [y for _, y in found],
            [y for _, y in tail],
            color=SIMULATED,
            alpha=0.13,
            lw=0,
            zorder=1,
            label="simulated, p50 to p90",
        )
    if said:
        axes.plot(*zip(*said, strict=True), "o-", color=PUBLISHED, lw=1.8, ms=6, zorder=4, label="published")
    if bound:
        axes.plot(*zip(*bound, strict=True), "v", color=PUBLISHED, mfc="white", ms=7, zorder=4)
        at, value = bound[0]
        axes.annotate(
            "at most",
            (at, value),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=PUBLISHED,
        )
    if found:
        axes.plot(*zip(*found, strict=True), "s-", color=SIMULATED, lw=1.8, ms=5, zorder=3, label="simulated")
    axes.set_title(curve.title.replace(": ", ":\n"), loc="left", fontsize=11)
    _knees(axes, curve, x)


def _hit(axes: Any, curve: Curve) -> None:
    x = {c: i for i, c in enumerate(_grid(curve))}
    said = [(x[p.concurrency], p.hit) for p in curve.published if p.hit is not None]
    found = [(x[p.concurrency], p.hit) for p in curve.simulated if p.hit is not None]
    ideal = [(x[p.concurrency], p.ideal) for p in curve.simulated if p.ideal is not None]
    if ideal:
        axes.plot(
            *zip(*ideal, strict=True), ":", color=IDEAL, lw=1.5, zorder=2, label="with an infinite cache"
        )
    if said:
        axes.plot(*zip(*said, strict=True), "o-", color=PUBLISHED, lw=1.8, ms=6, zorder=4, label="published")
    else:
        axes.text(
            0.03, 0.06, "no hit rate was published", transform=axes.transAxes, color=PUBLISHED, fontsize=9
        )
    if found:
        axes.plot(*zip(*found, strict=True), "s-", color=SIMULATED, lw=1.8, ms=5, zorder=3, label="simulated")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _knees(axes, curve, x, named=False)


def _knees(axes: Any, curve: Curve, x: dict[int, int], named: bool = True) -> None:
    """Lines at the knees; where both are at one place they lie beside each other."""
    same = curve.knee_published == curve.knee_simulated
    knees = (("published", curve.knee_published, -1), ("simulated", curve.knee_simulated, 1))
    first = min(x[at] for _, at, _ in knees if at is not None)
    for row, (name, at, side) in enumerate(knees):
        if at is not None:
            place = x[at] + (0.035 * side if same else 0.0)
            axes.axvline(place, color=FACES[name], lw=1.4, ls="--", zorder=2)
        if named:
            axes.annotate(
                f"no knee {name}" if at is None else f"knee {name}: {at}",
                (first, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-9, -6 - 14 * row),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=9,
                color=FACES[name],
            )


def _frame(axes: Any, curve: Curve) -> None:
    grid = _grid(curve)
    axes.set_xticks(range(len(grid)), [str(c) for c in grid])
    axes.set_xlim(-0.4, len(grid) - 0.6)
    axes.grid(color=GRID, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def _grid(curve: Curve) -> list[int]:
    return [p.concurrency for p in curve.published]


def _range(curves: list[Curve]) -> tuple[float, float]:
    values = [
        value
        for curve in curves
        for value in (
            *(p.ttft for p in curve.published),
            *(p.ttft for p in curve.simulated),
            *(p.ttft_p90 for p in curve.simulated),
        )
        if value
    ]
    return (0.5 * min(values), 6 * max(values)) if values else (0.01, 1000.0)
