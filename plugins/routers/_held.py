"""`Held`: whose KV a worker holds, in the order in which it will be evicted; `Returns`: who comes back.

The index says what is cached, not what goes next. Caches evict what was used least recently, so that the
order of placements is enough for a guess at it. Time is counted in requests: hours idle change nothing.
"""

from __future__ import annotations

from collections import OrderedDict

Key = tuple[str, str]  # tenant and session
AGES = 24  # powers of two, in requests


class Returns:
    """How likely a session that has been idle for so many requests is to come back, as seen so far."""

    MEMORY = 20_000  # requests

    def __init__(self) -> None:
        self._chances = [0.75] * AGES
        self._gaps = [0.0] * AGES  # returns, by the age at which they came
        self._placed = 0.0
        self._count = 0

    def note(self, gap: int) -> None:
        """A request was placed, so many after the last one of its session; 0: the session is new."""
        self._placed += 1
        if gap:
            self._gaps[_age(gap)] += 1
        self._count += 1
        if self._count % 64 == 0:
            self._learn()

    def chance(self, idle: int) -> float:
        return self._chances[_age(idle)]

    def _learn(self) -> None:
        later, left = sum(self._gaps), self._placed
        for age, gaps in enumerate(self._gaps):
            self._chances[age] = min(1.0, (later + 3) / (left + 4))
            later -= gaps
            left -= gaps
        if self._placed > self.MEMORY:
            self._placed /= 2
            self._gaps = [g / 2 for g in self._gaps]


class Held:
    """Of one worker's cache. Tokens are those that placements of ours added."""

    def __init__(self, generation: str) -> None:
        self.generation = generation
        self.tokens = 0
        self._sessions: OrderedDict[Key, list[int]] = OrderedDict()  # tokens, number of the last request

    def add(self, key: Key, tokens: int, now: int, capacity: int) -> None:
        """Request number `now` uses what the session has there and adds so many tokens."""
        entry = self._sessions.setdefault(key, [0, now])
        entry[0] += tokens
        entry[1] = now
        self._sessions.move_to_end(key)
        self.tokens += tokens
        while self.tokens > capacity:
            oldest = next(iter(self._sessions))
            entry = self._sessions[oldest]
            gone = min(entry[0], self.tokens - capacity)
            entry[0] -= gone
            self.tokens -= gone
            if not entry[0]:
                del self._sessions[oldest]

    def missed(self, tokens: int, cached: int, key: Key, now: int, returns: Returns) -> float:
        """Of so many tokens that must go, out of all `cached` ones: how many will be wanted again."""
        tokens -= max(0, cached - self.tokens)  # of nobody whom we know: not used for long
        missed = 0.0
        if tokens > 0:
            for other, (size, last) in self._sessions.items():
                if other == key:
                    continue  # used by this very request
                missed += min(size, tokens) * returns.chance(now - last)
                tokens -= size
                if tokens <= 0:
                    break
        return missed


def _age(requests: int) -> int:
    return min(AGES - 1, requests.bit_length())
