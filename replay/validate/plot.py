"""Predicted over measured as a PNG: one panel per quantity, uncalibrated beneath calibrated."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bien.replay.files import write_whole
from bien.replay.validate.display import NAMES
from bien.replay.validate.published import Compared, Outcome

CALIBRATED, PLAIN = "#2c6fb3", "#c9a66b"


def write_plot(path: Path, outcome: Outcome) -> None:
    """Draw it with matplotlib, which is imported now.

    Raises:
        ResourceError: the folder cannot be written to.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 5.2), dpi=130, layout="constrained")
    for axes, target in zip(figure.subplots(1, 2), NAMES, strict=True):
        draw(axes, target, outcome)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_whole(path, data.getvalue(), "plot")


def draw(axes: Any, target: str, outcome: Outcome) -> None:
    """On matplotlib axes: milliseconds, logarithmic; the band is the goal."""
    compared = outcome.compared[target]
    measured = [1e3 * c.measured for c in compared]
    error = outcome.median_error_uncalibrated[target]
    _scatter(axes, measured, [1e3 * c.uncalibrated.seconds for c in compared], PLAIN, "uncalibrated", error)
    if outcome.calibrate:
        error = outcome.median_error[target]
        _bars(axes, measured, compared)
        _scatter(
            axes, measured, [1e3 * c.calibrated.seconds for c in compared], CALIBRATED, "calibrated", error
        )
    if measured:
        ends = [min(measured), max(measured)]
        goal = outcome.goals[target]
        axes.fill_between(
            ends, [e * (1 - goal) for e in ends], [e * (1 + goal) for e in ends], color="#d9dee4", zorder=1
        )
        axes.plot(ends, ends, color="#444444", lw=1, zorder=4)
        axes.legend(framealpha=1, edgecolor="#c4cad1")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"measured {NAMES[target]}, ms")
    axes.set_ylabel(f"predicted {NAMES[target]}, ms")
    axes.set_title(
        f"{NAMES[target]}: {len(compared):,} points that no calibration used", loc="left", fontsize=11
    )
    axes.grid(color="#e4e7eb", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def _scatter(axes: Any, x: list[float], y: list[float], colour: str, name: str, error: float | None) -> None:
    label = name if error is None else f"{name}: median error {error:.1%} (known models, gpus)"
    axes.scatter(x, y, s=9, color=colour, alpha=0.7, lw=0, zorder=3, label=label)


def _bars(axes: Any, x: list[float], compared: list[Compared]) -> None:
    low, high = ([1e3 * getattr(c.calibrated, end) for c in compared] for end in ("low", "high"))
    axes.vlines(x, low, high, color=CALIBRATED, alpha=0.12, lw=0.8, zorder=2)
