"""`PlainTable`: the table in Python, each engine for itself. For machines without a compiler, and the measure
of the compiled one, with which it shares nothing, in tests.

The name of a block says which one is before it, and this table relies on that to look at few of them.
Events that contradict each other, a block told with two parents, no engine makes whose names are chained
hashes; of such blocks the compiled table, which looks at each, says what is held, and this one may count
them although one before them is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from bien.core.api import KVEvent
from bien.gateway.api import WorkerInfo
from bien.plugins.indexes._mirror.chain import Chain
from bien.plugins.indexes._mirror.engine import Engine
from bien.plugins.indexes._mirror.table import Size


class PlainTable:
    kind = "python"

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._numbers = itertools.count()

    def join(self, info: WorkerInfo) -> int:
        number = next(self._numbers)
        self._engines[number] = Engine(info)
        return number

    def leave(self, engine: int) -> None:
        del self._engines[engine]

    def clear(self, engine: int) -> None:
        self._engines[engine].clear()

    def feed(self, engine: int, events: Iterable[KVEvent]) -> None:
        self._engines[engine].feed(events)

    def predict(self, engine: int, hashes: bytes, expires: float) -> None:
        self._engines[engine].predict(hashes, expires)

    def take_back(self, engine: int, hashes: bytes) -> None:
        self._engines[engine].take_back(hashes)

    def forget(self, engine: int) -> None:
        self._engines[engine].predictions = []

    def usable(self, hashes: bytes, engines: list[int], now: float) -> list[int]:
        chain, known = Chain(hashes), self._engines
        return [known[e].usable(chain, now) if e >= 0 else 0 for e in engines]

    def loadable(self, hashes: bytes, engines: list[int], now: float) -> list[int]:
        chain, known = Chain(hashes), self._engines
        return [known[e].loadable(chain, now) if e >= 0 else 0 for e in engines]

    def size(self) -> Size:
        blocks = sum(len(e.near if e.far is None else e.far) for e in self._engines.values())
        return Size(blocks, blocks, 0)
