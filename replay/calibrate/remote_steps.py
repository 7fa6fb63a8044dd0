"""What the streams of a probe say of an engine's steps. Nothing here is asked of the server."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from bien.core.costs.observed import Observed, Step, place
from bien.replay.calibrate.metrics import Sum
from bien.replay.calibrate.remote_flow import Flow
from bien.replay.record import TurnRecord

STALL = 3.0  # usual gaps: beyond, the machine did something else
NEAR = 0.4  # of the gap between two steps: how far a newcomer's first token may be from its own
SPLIT = 1.5  # usual steps: what takes longer has a part of a prompt in it
LARGE = 512  # tokens of a prompt that may be split


class Window(msgspec.Struct, frozen=True):
    """Steps in which all sequences of a batch decoded. `seconds`: of one, by the client."""

    step: Step
    seconds: float
    steps: int
    stalled: bool  # gaps were left out


def window(flow: Flow) -> Window | None:
    """None: the batch did not decode together for long enough."""
    begin = max(flow.since, *(r.first for r in flow.records))
    end = min(flow.until, *(r.last for r in flow.records))
    seconds, tokens, starts = [], [], []
    for record in flow.records:
        times, counts = _stream(record)
        inside = np.flatnonzero((times >= begin) & (times <= end))
        if len(inside) < 2:
            return None
        i, j = inside[0], inside[-1]
        seconds.append(np.diff(times[i : j + 1]))
        tokens.append(counts[i + 1 : j + 1])
        # The token in the middle of those that came; the step that made it read the one before.
        before, all_ = counts[: i + 1].sum(), counts[: j + 1].sum()
        starts.append(int(record.prompt_tokens + (before + 1 + all_) // 2 - 2))
    gaps, weights = np.concatenate(seconds), np.concatenate(tokens)
    each = gaps / weights
    usual = each <= STALL * np.median(each)
    step = Step(tuple(starts), (1,) * len(starts), len(starts))
    steps = round(weights.sum() / len(starts))
    return Window(step, float(gaps[usual].sum() / weights[usual].sum()), steps, not usual.all())


def prompt_steps(start: int, tokens: int, chunk: int, beside: Sequence[int] = ()) -> tuple[Step, ...]:
    """The steps that compute `tokens` of a prompt from position `start` on, with sequences that decode at
    `beside`, which come first in each step's budget."""
    out: list[Step] = []
    rows, at = len(beside), start
    while at < start + tokens:
        count = min(chunk - rows, start + tokens - at)
        last = at + count == start + tokens
        decoding = tuple(b + len(out) for b in beside)
        out.append(Step((*decoding, at), (*(1 for _ in decoding), count), rows + last))
        at += count
    return tuple(out)


def alone(record: TurnRecord, cached: int, chunk: int, prefill: Sum | None) -> list[Observed]:
    """A prompt that ran alone. `prefill`: what the server counted of it, the request's way left out."""
    new = record.prompt_tokens - cached
    steps = prompt_steps(cached, new, chunk)
    first = record.first - record.sent
    if prefill is None or prefill.count != 1 or not 0 < prefill.seconds < first:
        where = _places(steps) + "/way"
        return [Observed(first, steps, where, requests=1, prompt_tokens=record.prompt_tokens)]
    way = f"way/{record.prompt_tokens.bit_length()}"
    return [
        Observed(prefill.seconds, steps, _places(steps)),
        Observed(first - prefill.seconds, (), way, requests=1, prompt_tokens=record.prompt_tokens),
    ]


class Newcomer(msgspec.Struct, frozen=True):
    """What a prompt did to a batch. `observed` is None where it cannot be told; `split`: the step before
    those that should have held it was as long as one of them."""

    observed: Observed | None
    split: bool = False


def newcomer(flow: Flow, record: TurnRecord, chunk: int, usual: float, mixes: bool) -> Newcomer:
    """`usual`: seconds of a step without it. `mixes`: the engine computes prompts and decodes in one step;
    else prompts come first, in steps of their own."""
    beside, seconds, before = [], [], []
    held = len(prompt_steps(0, record.prompt_tokens, chunk, [0] * len(flow.records))) if mixes else 1
    for stream in flow.records:
        times, counts = _stream(stream)
        if mixes:  # its first token comes with those of the step that made it
            last = int(np.abs(times - record.first).argmin())
        else:  # the others' next ones come a step later
            last = int(np.searchsorted(times, record.first, side="right"))
        first = last - held
        if first < 1 or last >= len(times) or (counts[first : last + 1] != 1).any():
            return Newcomer(None)
        late = record.first - times[last]
        if mixes and not -NEAR * (times[last] - times[last - 1]) <= late <= NEAR * usual:
            return Newcomer(None)
        seconds.append(times[last] - times[first])
        before.append(times[first] - times[first - 1])
        # The step after chunk `first` reads the last of the tokens that had come.
        beside.append(stream.prompt_tokens + int(counts[: first + 1].sum()) - 1)
    took = float(np.median(seconds))
    if mixes:
        steps = prompt_steps(0, record.prompt_tokens, chunk, beside)
        split = record.prompt_tokens >= LARGE and float(np.median(before)) > SPLIT * usual
    else:
        decode = Step(tuple(beside), (1,) * len(beside), len(beside))
        steps = (*prompt_steps(0, record.prompt_tokens, chunk), decode)
        split = False
    return Newcomer(Observed(took, steps, _places(steps)), split)


def merged(found: Sequence[Observed]) -> list[Observed]:
    """Repeats of a place become one: the mean of those that take at most three times as long as their
    median, and the steps of the one in the middle."""
    places: dict[str, list[Observed]] = {}
    for o in found:
        places.setdefault(o.place, []).append(o)
    out = []
    for repeats in places.values():
        middle = float(np.median([o.seconds for o in repeats]))
        kept = sorted((o for o in repeats if o.seconds <= STALL * middle), key=_size)
        count = sum(o.repeats for o in kept)
        seconds = sum(o.seconds * o.repeats for o in kept) / count
        out.append(msgspec.structs.replace(kept[len(kept) // 2], seconds=seconds, repeats=count))
    return out


def _places(steps: Sequence[Step]) -> str:
    """Of the first and the last; how many there are follows."""
    if len(steps) == 1:
        return place(steps[0])
    return f"{place(steps[0])}+{place(steps[-1])}/{len(steps)} steps"


def _size(o: Observed) -> tuple[float, int]:
    return sum(s.looked_at for s in o.steps), o.prompt_tokens


def _stream(record: TurnRecord) -> tuple[np.typing.NDArray[np.float64], np.typing.NDArray[np.int64]]:
    times = np.frombuffer(record.chunk_times.tobytes(), np.float64)
    return times, np.frombuffer(record.chunk_counts.tobytes(), np.uint32).astype(np.int64)
