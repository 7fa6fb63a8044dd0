"""When each stream of a session waited, was prefilled, decoded and paused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from bien.replay.turns_file import TurnLine

Doing = Literal["gap", "agents", "ttft", "decode", "failed", "cut"]
IDLE_SHARE = 0.35  # of a drawing's width, at most


class Span(msgspec.Struct, frozen=True):
    """Seconds since the run's start. `gap`: tools and thinking; `agents`: a parent that waits for its
    sub-agents; `ttft`: sent, no token yet; `cut`: in flight when the run was interrupted. Only `failed` may
    last no time at all."""

    start: float
    end: float
    doing: Doing


class Lane(msgspec.Struct):
    """One stream; `depth` 0 is a main agent, 1 its sub-agents."""

    stream: int
    name: str
    depth: int
    turns: int
    spans: list[Span]


class Timeline(msgspec.Struct):
    """One session tree, parents before their sub-agents."""

    session: str
    lanes: list[Lane]

    @property
    def start(self) -> float:
        return min((s.start for lane in self.lanes for s in lane.spans), default=0.0)

    @property
    def end(self) -> float:
        return max((s.end for lane in self.lanes for s in lane.spans), default=0.0)

    @property
    def turns(self) -> int:
        return sum(lane.turns for lane in self.lanes)


def timelines(turns: Iterable[TurnLine]) -> list[Timeline]:
    """Of every session, in order of their first turns."""
    sessions: dict[str, dict[int, list[TurnLine]]] = {}
    over = 0.0
    for turn in turns:
        sessions.setdefault(turn.session, {}).setdefault(turn.stream, []).append(turn)
        over = max(over, *(t or 0.0 for t in (turn.sent, turn.last, turn.ended)))
    return [Timeline(name, _lanes(streams, over)) for name, streams in sessions.items()]


def _lanes(streams: dict[int, list[TurnLine]], over: float) -> list[Lane]:
    children: dict[int | None, list[int]] = {}
    for stream, turns in streams.items():
        parent = turns[0].parent if turns[0].parent in streams else None
        children.setdefault(parent, []).append(stream)
    lanes: list[Lane] = []
    todo = [(s, 0) for s in reversed(children.get(None, []))]
    while todo:
        stream, depth = todo.pop()
        turns = streams[stream]
        label = turns[0].label
        name = label or ("main" if turns[0].parent is None else f"sub-agent {stream}")
        lanes.append(Lane(stream, name, depth, len(turns), _spans(turns, over)))
        todo += [(s, depth + 1) for s in reversed(children.get(stream, []))]
    return lanes


def _spans(turns: Sequence[TurnLine], over: float) -> list[Span]:
    spans: list[Span] = []

    def add(start: float | None, end: float | None, doing: Doing) -> None:
        if start is not None and end is not None and end > start:
            spans.append(Span(start, end, doing))

    before: float | None = None
    for turn in turns:
        add(before, turn.ready, "agents")
        add(turn.ready, turn.sent, "gap")
        if turn.ended is None:
            add(turn.sent, over, "cut")
        elif turn.error:
            if turn.sent is not None:  # at once, too
                spans.append(Span(turn.sent, max(turn.sent, turn.ended), "failed"))
        else:
            add(turn.sent, turn.first, "ttft")
            add(turn.first, turn.last, "decode")
        before = turn.ended
    return spans


class Scale(msgspec.Struct):
    """Time to place. Stretches in which no stream is in flight are drawn no longer than `cap` seconds,
    so that hours of thinking do not push the turns together."""

    times: list[float]
    places: list[float]
    cap: float
    cut: list[tuple[float, float]]  # the stretches that are drawn shorter

    def at(self, time: float) -> float:
        return float(np.interp(time, self.times, self.places))

    def time(self, place: float) -> float:
        return float(np.interp(place, self.places, self.times))


def scale(spans: Iterable[Span]) -> Scale:
    """Of everything that one drawing shows."""
    spans = list(spans)
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    idle = _idle([s for s in spans if s.doing not in ("gap", "agents")], start, end)
    lengths = np.array([b - a for a, b in idle])
    cap = _cap(lengths, (end - start - float(lengths.sum())) * IDLE_SHARE / (1 - IDLE_SHARE))
    times, places, cut = [start], [0.0], []
    for (a, b), length in zip(idle, lengths, strict=True):
        if length > cap:
            places += [places[-1] + a - times[-1], places[-1] + a - times[-1] + cap]
            times += [a, b]
            cut.append((a, b))
    places.append(places[-1] + end - times[-1])
    times.append(end)
    return Scale(times, places, cap, cut)


def _idle(busy: list[Span], start: float, end: float) -> list[tuple[float, float]]:
    idle: list[tuple[float, float]] = []
    for span in sorted(busy, key=lambda s: s.start):
        if span.start > start:
            idle.append((start, span.start))
        start = max(start, span.end)
    return [*idle, (start, end)] if end > start else idle


def _cap(lengths: np.ndarray, room: float) -> float:
    """The length to which to cut so that all together take up `room`."""
    if not len(lengths) or float(lengths.sum()) <= room or room <= 0:
        return float("inf")
    left = room
    ordered = np.sort(lengths)
    for i, length in enumerate(ordered):
        if length * (len(ordered) - i) > left:
            return left / (len(ordered) - i)
        left -= float(length)
    return float("inf")
