"""A placement found with knowledge of the whole trace: what a router could have done, had it known.

The times of a run that has ended are taken for granted: when each turn came, how long its prompt was, what of
it was new. On this timetable a model that costs a microsecond a turn says what a placement would have
cost: each worker computes prompts one after the other, and keeps what fits, letting go of the tail of the
session that was used longest ago. A local search then moves session trees, their later parts and single
turns between workers as long as the sum of waiting falls. What it finds is simulated on the whole stack like
any policy; nothing is believed of the model. The best of what was found is a bound from one side: a better
placement may exist.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np

from bien.replay.route.variant import Floats, Hindsight, Placement, Seen

BUDGET, EACH = 300_000, 500  # turns that the model is asked about: in one search, and more for each turn
MOVE = 150  # turns that a move costs besides
BINS = 400  # of the timetable, for the balance of session trees
LARGE = 0.9  # quantile of uncached tokens: the speed is read off prompts beyond it


def improved(given: Hindsight) -> Placement:
    """The placement that the search ends with; deterministic for a seed."""
    timetable = Timetable(given.seen, given.capacity)
    start = timetable.balanced() if given.balanced else given.seen["worker"].astype(int).tolist()
    search = Search(timetable, start, random.Random(given.seed))
    search.run(BUDGET + EACH * len(given.seen.ids))
    return Placement(given.seen.ids, search.placement)


class Timetable:
    """Turns in the order in which they came."""

    def __init__(self, seen: Seen, capacity: int) -> None:
        order = np.argsort(seen["sent"], kind="stable")
        self.order: list[int] = order.tolist()
        self.workers = len(seen.workers)
        self.capacity = float(capacity)
        self.sent: list[float] = seen["sent"].tolist()
        self.prompt: list[float] = seen["prompt"].tolist()
        self.after: list[float] = (seen["prompt"] + seen["output"]).tolist()
        self.whole: list[float] = seen["whole"].tolist()
        self.token = prefill_seconds(seen)
        names = [id.rsplit("/", 2)[0] for id in seen.ids]
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self.session = [numbers[name] for name in names]
        self.turns: list[list[int]] = [[] for _ in numbers]  # of each session, in order
        for i in self.order:
            self.turns[self.session[i]].append(i)

    def serve(self, turns: list[int], waits: list[float]) -> float:
        """Seconds that these turns, in order, wait for first tokens on one worker; `waits` gets each."""
        held: OrderedDict[int, float] = OrderedDict()
        used = free = total = 0.0
        sent, prompt, after, whole = self.sent, self.prompt, self.after, self.whole
        session, token, capacity = self.session, self.token, self.capacity
        for i in turns:
            name = session[i]
            had = held.pop(name, 0.0)
            hit = whole[i] if whole[i] < had else had
            now = sent[i]
            free = (free if free > now else now) + (prompt[i] - hit) * token
            waits[i] = free - now
            total += free - now
            held[name] = after[i]
            used += after[i] - had
            while used > capacity:
                oldest, tokens = next(iter(held.items()))
                if oldest == name:
                    break
                if (spare := used - capacity) < tokens:
                    held[oldest] = tokens - spare  # it stays the oldest
                    used = capacity
                else:
                    del held[oldest]
                    used -= tokens
        return total

    def balanced(self) -> list[int]:
        """A worker for each turn: session trees, the most work first, each where it meets the least work
        and the fewest tokens held at the same time."""
        begin, end = min(self.sent), max(self.sent) + 1e-9
        bins = [int((t - begin) / (end - begin) * (BINS - 1)) for t in self.sent]
        work = np.zeros((len(self.turns), BINS))
        room = np.zeros((len(self.turns), BINS))
        for s, turns in enumerate(self.turns):
            for i in turns:
                work[s, bins[i]] += (self.prompt[i] - self.whole[i]) * self.token
            first, last = bins[turns[0]], bins[turns[-1]]
            room[s, first : last + 1] = max(self.after[i] for i in turns)
        loads, held = np.zeros((self.workers, BINS)), np.zeros((self.workers, BINS))
        chosen = [0] * len(self.turns)
        recompute = self.token / max(1.0, BINS)
        for s in np.argsort(-(work.sum(1) + room.mean(1) * self.token), kind="stable").tolist():
            meeting = loads @ work[s]
            over = np.maximum(0.0, held + room[s] - self.capacity) - np.maximum(0.0, held - self.capacity)
            cost = meeting + over.sum(1) * recompute * len(self.turns[s])
            ties = (cost <= cost.min() + 1e-12).nonzero()[0]
            at = int(ties[np.argmin(loads[ties].sum(1) + held[ties].mean(1) * self.token)])
            chosen[s] = at
            loads[at] += work[s]
            held[at] += room[s]
        return [chosen[s] for s in self.session]


class Search:
    """Moves turns between workers while the model says that it helps."""

    def __init__(self, timetable: Timetable, placement: list[int], rng: random.Random) -> None:
        self.placement = placement
        self._t = timetable
        self._rng = rng
        self._waits = [0.0] * len(placement)
        self._turns: list[list[int]] = [[] for _ in range(timetable.workers)]
        for i in timetable.order:
            self._turns[placement[i]].append(i)
        self._totals = [timetable.serve(turns, self._waits) for turns in self._turns]
        self._position = {i: n for n, i in enumerate(timetable.order)}

    @property
    def total(self) -> float:
        """Seconds of waiting, by the model."""
        return sum(self._totals)

    def run(self, budget: int) -> None:
        """Until the model has been asked about `budget` turns."""
        if self._t.workers < 2 or not self.placement:
            return
        picks: list[int] = []
        while budget > 0:
            if not picks:  # those that wait longest are tried most, and what waits changes
                picks = self._rng.choices(range(len(self._waits)), [w + 1e-6 for w in self._waits], k=64)
            budget -= self._try(picks.pop())

    def _try(self, turn: int) -> int:
        t, rng = self._t, self._rng
        mates = t.turns[t.session[turn]]
        here = self.placement[turn]
        there = rng.randrange(t.workers - 1)
        there += there >= here
        at = mates.index(turn)
        moved = rng.choice((mates, mates[at:], mates[:at] or mates, [turn]))
        moved = [i for i in moved if self.placement[i] != there]
        sources = {self.placement[i] for i in moved}
        lists = {w: self._turns[w] for w in (*sources, there)}
        gone = set(moved)
        trial = {w: [i for i in lists[w] if i not in gone] for w in sources}
        trial[there] = sorted([*lists[there], *moved], key=self._position.__getitem__)
        waits: list[float] = self._waits.copy()
        totals = {w: t.serve(turns, waits) for w, turns in trial.items()}
        if sum(totals.values()) < sum(self._totals[w] for w in trial) - 1e-9:
            self._waits = waits
            for w, turns in trial.items():
                self._turns[w], self._totals[w] = turns, totals[w]
            for i in moved:
                self.placement[i] = there
        return MOVE + sum(map(len, trial.values()))


def prefill_seconds(seen: Seen) -> float:
    """Of one uncached token: what the quickest of the long prompts took."""
    new, ttft = seen["prompt"] - seen["cached"], seen["ttft"]
    long = (new >= np.quantile(new, LARGE)) & (new > 0) & ~np.isnan(ttft)
    rates: Floats = ttft[long] / new[long]
    return float(np.quantile(rates, 0.1)) if len(rates) else 1e-4
