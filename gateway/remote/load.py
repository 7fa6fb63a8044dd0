"""`Load`: what a remote engine has to do, by our own books and by what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bien.core.worker.messages import WorkerStats
from bien.gateway.remote.dialect import Readings

# Of placements the gateway itself keeps account until so many reports came (roster.py).
REPORTS_BEHIND = 2
MEAN_OF = 1 / 32  # weight of the newest request in a mean
MOST = 1e18
RANK_LABELS = ("engine", "dp_rank")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Work:
    """One generation there."""

    prompt_tokens: int
    uncached: int  # as the router expects
    born: int  # reports made before it came
    started: bool = False


class Load:
    def __init__(self) -> None:
        self.works: dict[int, Work] = {}  # by rid
        self.readings = Readings()  # as last polled; other gateways' requests are in it
        self._others = (0, 0)  # of these, running and waiting
        self._totals = WorkerStats()
        self._reports = 0
        self._busy: float | None = None  # since when it has work of ours
        self._mean = 0.0  # uncached tokens of a request, of ours lately

    def look(self, readings: Readings, ours: int) -> None:
        """The server was polled; until then it had `ours` requests of this gateway at most. What it had
        beside them is others', until the next poll: ours that end meanwhile are not counted on."""
        self.readings = readings
        running, waiting = max(0, readings.running or 0), max(0, readings.waiting or 0)
        others = max(0, running + waiting - max(ours, len(self.works)))
        self._others = others - min(others, waiting), min(others, waiting)

    def add(self, rid: int, prompt_tokens: int, uncached: int, now: float) -> None:
        self.works[rid] = Work(prompt_tokens, uncached, self._reports)
        self._mean += (uncached - self._mean) * (MEAN_OF if self._mean else 1.0)
        if self._busy is None:
            self._busy = now

    def gained(self, rid: int, tokens: int) -> None:
        work = self.works[rid]
        if not work.started:
            work.started = True
            self._totals.prompt_tokens += work.prompt_tokens
            self._totals.computed_tokens += work.uncached
        self._totals.output_tokens += tokens

    def remove(self, rid: int, now: float, cached: int = -1) -> None:
        """`cached`: of an answer that came to its end, where the engine says it."""
        work = self.works.pop(rid, None)
        if work is None:
            return
        self._totals.finished += 1
        if cached >= 0:
            self._totals.cached_tokens += cached
            self._totals.computed_tokens += work.prompt_tokens - cached - work.uncached
        if not self.works and self._busy is not None:
            self._totals.busy_seconds += now - self._busy
            self._busy = None

    def report(self, now: float) -> WorkerStats:
        """For the gateway."""
        works, read = self.works.values(), self.readings
        started = sum(work.started for work in works)
        running, waiting = self._others
        behind = self._reports - REPORTS_BEHIND
        self._reports += 1
        totals = self._totals
        return WorkerStats(
            running=started + running,
            waiting=len(works) - started + waiting,
            # What others have brought is known as a number of requests only: they count as ours do.
            queued_tokens=sum(w.uncached for w in works if not w.started and w.born <= behind)
            + round(waiting * self._mean),
            used_blocks=round((read.usage or 0.0) * (read.blocks or 0)),
            total_blocks=read.blocks or 0,
            computed_tokens=totals.computed_tokens,
            output_tokens=totals.output_tokens,
            cached_tokens=totals.cached_tokens,
            prompt_tokens=totals.prompt_tokens,
            busy_seconds=totals.busy_seconds + (now - self._busy if self._busy is not None else 0.0),
            finished=totals.finished,
        )


def parse_metrics(
    text: str, rank: int | None = None
) -> tuple[dict[str, float], dict[str, Mapping[str, str]]]:
    """Prometheus' text format: by name, the sum of the samples, and the labels of the last one. Without those
    that are no numbers, or larger than anything that is counted, and, with `rank`, those that say they are
    another rank's."""
    samples: dict[str, float] = {}
    labels: dict[str, Mapping[str, str]] = {}
    for line in text.splitlines():
        if not (found := _SAMPLE.match(line)):
            continue
        name, tags, value = found.groups()
        named = dict(_LABEL.findall(tags or ""))
        if rank is not None and any(named.get(label, str(rank)) != str(rank) for label in RANK_LABELS):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if abs(number) <= MOST:  # NaN is said of what was never measured
            samples[name] = samples.get(name, 0.0) + number
            labels[name] = named
    return samples, labels
