"""The page's figures as inline SVG. matplotlib is imported when they are drawn."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bien.replay.ladder import Ladder, Rung
from bien.replay.ladder_plot import draw_curve
from bien.replay.metrics import Distribution
from bien.replay.report.timeline import Span, Timeline, scale
from bien.replay.report.words import clock_text, plain
from bien.replay.result import Cache
from bien.replay.turns_file import TurnLine

WIDTH = 11.0  # inches; the page scales it
LANE = 0.21
TICKS = 9
THIN = 1.2  # points: what failed at once is seen too
VECTORS = 3000  # spans; more are drawn as pixels
COLOURS = {
    "gap": "#d9d9d9",
    "agents": "#cbb7e0",
    "ttft": "#e6862a",
    "decode": "#2c6fb3",
    "failed": "#c62828",
    "cut": "#7a7a7a",
}
CACHE_COLOURS = {
    "achieved": "#3d8f5f",
    "rounding": "#f3c96b",
    "other_replica": "#e6862a",
    "capacity": "#c62828",
    "unknown": "#7a7a7a",
    "new content": "#e4e7eb",
}
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may hold a $
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "xtick.color": "#40454d",
    "ytick.color": "#40454d",
}


def draw_session(timeline: Timeline, most: int) -> str:
    """Swim lanes of one session tree, `most` at most; stretches in which it is idle are drawn shorter."""
    lanes = timeline.lanes[:most]
    rows = [(f"{'   ' * lane.depth}{plain(lane.name)}", lane.spans) for lane in lanes]
    return _svg(f"session {timeline.session}", len(rows), lambda figure: _lanes(figure, rows))


def draw_run(sessions: Sequence[Timeline]) -> str:
    """One lane a session, over the whole run."""
    rows = []
    for timeline in sessions:
        busy = [s for lane in timeline.lanes for s in lane.spans if s.doing not in ("gap", "agents")]
        rows.append((plain(timeline.session), [Span(timeline.start, timeline.end, "gap"), *busy]))
    return _svg("run", len(rows), lambda figure: _lanes(figure, rows))


def _lanes(figure: Any, rows: list[tuple[str, list[Span]]]) -> None:
    spans = [s for _, row in rows for s in row]
    axes = figure.add_axes((0.17, 0.36 / figure.get_figheight(), 0.82, 1 - 0.46 / figure.get_figheight()))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    if not spans:
        axes.set_xticks([])
        return
    place = scale(spans)
    for a, b in place.cut:
        axes.axvspan(place.at(a), place.at(b), color="#f1f2f4", lw=0, zorder=0)
    pixels = len(spans) > VECTORS
    for doing, colour in COLOURS.items():
        thick = 0.16 if doing == "gap" else 0.3 if doing == "agents" else 0.72
        for y, (_, row) in enumerate(rows):
            bars = [(place.at(s.start), place.at(s.end) - place.at(s.start)) for s in row if s.doing == doing]
            if bars:
                edge = THIN if doing in ("failed", "cut") else 0
                axes.broken_barh(
                    bars, (y - thick / 2, thick), color=colour, linewidth=edge, rasterized=pixels, zorder=2
                )
    width = place.places[-1]
    axes.set_xlim(0, width or 1.0)
    ticks = np.linspace(0, width, TICKS) if width else np.zeros(1)
    whole, step = place.times[-1] - place.times[0], width / (TICKS - 1)
    axes.set_xticks(ticks, [clock_text(place.time(t), whole, step) for t in ticks])
    if width:
        axes.xaxis.get_majorticklabels()[-1].set_horizontalalignment("right")


def draw_distributions(turns: Sequence[TurnLine], ttft: Distribution, tpot: Distribution) -> str:
    """TTFT and TPOT of turns without error, with the result's percentiles; TTFT against what was computed.
    Empty without such a turn."""
    good = [t for t in turns if not t.error and t.ended is not None]
    if not any(t.ttft is not None for t in good):
        return ""

    def draw(figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3)
        _histogram(left, "TTFT ms", [t.ttft * 1e3 for t in good if t.ttft is not None], ttft)
        _histogram(middle, "TPOT ms", [t.tpot * 1e3 for t in good if t.tpot is not None], tpot)
        for name, colour, main in (("main agents", "#2c6fb3", True), ("sub-agents", "#e6862a", False)):
            dots = [
                (t.prompt - t.cached, t.ttft * 1e3)
                for t in good
                if t.cached is not None and t.ttft is not None and (t.parent is None) == main
            ]
            if dots:
                x, y = zip(*dots, strict=True)
                right.scatter(
                    x, y, s=7, alpha=0.5, lw=0, color=colour, label=name, rasterized=len(x) > VECTORS
                )
        if right.collections:
            seen = [t.ttft * 1e3 for t in good if t.ttft is not None]
            low, high = min(seen), max(seen)
            if low > 0 and high > 10 * low:
                _logarithmic(right.set_yscale, right.yaxis)
            if max(right.get_xlim()) > 1000:
                _logarithmic(right.set_xscale, right.xaxis, "symlog", linthresh=100)
                right.set_xlim(left=0)
            right.legend(edgecolor="none", framealpha=0.8, fontsize=7.5)
        else:
            _nothing(right, "cached tokens are not known")
        right.set_title("TTFT ms against uncached prompt tokens", fontsize=9, loc="left")
        figure.tight_layout()

    return _svg("distributions", 0, draw, height=2.7)


def _histogram(axes: Any, title: str, values: list[float], marks: Distribution) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    if not values:
        _nothing(axes, "no turn has one")
        return
    axes.set_ylabel("turns")
    low, high = min(values), max(values)
    if marks.p99 is not None and marks.p50 and high > 2 * marks.p99 and marks.p99 < 3 * marks.p50:
        near = [v for v in values if v <= 1.2 * marks.p99]  # a few far off would press all into one bar
        if near:
            axes.set_title(
                f"{title} ({len(values) - len(near)} more up to {high:,.4g})", fontsize=9, loc="left"
            )
            values, high = near, max(near)
    if low > 0 and high > 10 * low:
        _logarithmic(axes.set_xscale, axes.xaxis)
        bins: Any = np.geomspace(low, high, 41)
    else:
        margin = max((high - low) * 0.02, abs(high) * 0.01, 1e-6)
        bins = np.linspace(low - margin, high + margin, 41)
    axes.hist(values, bins=bins, color="#9db8d6")
    axes.yaxis.get_major_locator().set_params(integer=True)
    for name, dash in (("p50", "-"), ("p90", "--"), ("p99", ":")):
        value = getattr(marks, name)
        if value is not None:
            axes.axvline(value, color="#22303f", lw=1, ls=dash, label=f"{name} {value:,.4g}")
    axes.legend(edgecolor="none", framealpha=0.8, fontsize=7.5)


def _nothing(axes: Any, why: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="#5d6875")


def _logarithmic(set_scale: Callable[..., None], axis: Any, kind: str = "log", **more: float) -> None:
    """With ticks as plain numbers: matplotlib's are formulas, which are not drawn here."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale(kind, **more)
    if kind == "log":
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        axis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if decades < 1.5 else (1, 3) if decades < 2.5 else (1,))
        )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def cache_parts(cache: Cache) -> list[tuple[str, float]]:
    """Shares of all prompt tokens that add up to 1; empty when nothing is known."""
    if cache.ideal is None or cache.achieved is None or cache.loss is None:
        return []
    losses = [(name, float(getattr(cache.loss, name))) for name in cache.loss.__struct_fields__]
    return [("achieved", cache.achieved), *losses, ("new content", 1 - cache.ideal)]


def draw_ladder(ladder: Ladder, here: Rung) -> str:
    """The ladder's curve; a ring around the rung that is `here`."""

    def draw(figure: Any) -> None:
        axes = figure.add_axes((0.07, 0.14, 0.62, 0.78))
        draw_curve(axes, ladder)
        if here.point is not None:
            axes.scatter(*here.point, s=230, facecolor="none", edgecolor="#e6862a", lw=1.6, zorder=4)

    return _svg("ladder", 0, draw, height=4.2)


def draw_cache(cache: Cache) -> str:
    """All prompt tokens as one bar."""

    def draw(figure: Any) -> None:
        axes = figure.add_axes((0.015, 0.3, 0.965, 0.62))
        at = 0.0
        for name, share in cache_parts(cache):
            axes.barh(0, max(0.0, share), left=at, color=CACHE_COLOURS[name], edgecolor="white", lw=0.6)
            if share > 0.08:
                light = name in ("new content", "rounding")
                text = f"{name.replace('_', ' ')} {share:.1%}"
                axes.text(
                    at + share / 2, 0, text, ha="center", va="center", color="#22303f" if light else "w"
                )
            at += max(0.0, share)
        axes.axvline(cache.ideal, color="#22303f", lw=1.2, ls="--")
        axes.set_xlim(0, max(1.0, at))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xticks(np.linspace(0, 1, 11), [f"{x:.0%}" for x in np.linspace(0, 1, 11)])

    return _svg("cache", 0, draw, height=0.85)


def _svg(salt: str, rows: int, draw: Callable[[Any], None], height: float | None = None) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has it, or a box
        figure = Figure(figsize=(WIDTH, height or 0.5 + LANE * max(rows, 1)), dpi=150)
        draw(figure)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]
