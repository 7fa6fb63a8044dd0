"""Predicted over measured of a calibration's places, as a PNG."""

from __future__ import annotations

import io
from pathlib import Path

from bien.replay.calibrate.learn import Learnt
from bien.replay.files import write_whole

FITTED, OTHERS = "#c9a66b", "#2c6fb3"


def write_plot(path: Path, learnt: Learnt) -> None:
    """ResourceError: the folder cannot be written to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.6), dpi=130, layout="constrained")
    both, off = figure.subplots(1, 2)
    found = learnt.calibration
    ends = [1e3 * f(c.measured for c in learnt.compared) for f in (min, max)]
    both.plot(ends, ends, color="#444444", lw=1, zorder=2)
    for fitted, colour, residuals, name in (
        (True, FITTED, found.fitted, "fitted to"),
        (False, OTHERS, found.held_out, "others"),
    ):
        some = [c for c in learnt.compared if c.fitted == fitted]
        label = f"{name}: {len(some)} places" + (
            f", median error {residuals.median:.1%}" if residuals else ""
        )
        x = [1e3 * c.measured for c in some]
        both.scatter(x, [1e3 * c.predicted for c in some], s=14, color=colour, lw=0, zorder=3, label=label)
        off.scatter(
            x, [100 * (c.predicted / c.measured - 1) for c in some], s=14, color=colour, lw=0, zorder=3
        )
    both.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted, ms")
    both.legend(framealpha=1, edgecolor="#c4cad1")
    both.set_title(f"{found.engine}", loc="left", fontsize=11)
    off.axhspan(-5, 5, color="#d9dee4", zorder=1)
    off.axhline(0, color="#444444", lw=1, zorder=2)
    off.set(xscale="log", xlabel="measured step, ms", ylabel="predicted is off by, %")
    off.set_title("residuals (band: 5 %)", loc="left", fontsize=11)
    for axes in (both, off):
        axes.grid(color="#e4e7eb", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_whole(path, data.getvalue(), "plot")
