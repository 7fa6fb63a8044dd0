"""`Mirror`: every worker's cached blocks in this process, fed by their events; what indexes have in common.

It follows the events of each (worker, dp_rank): generation, number, gaps. Who holds what is the table's
matter (`make_table`), compiled or in Python; the answers are the same, to the block.
"""

from __future__ import annotations

from typing import NamedTuple

from bien.core.api import Clock, EventBatch, KVEvent
from bien.gateway.api import WorkerInfo
from bien.plugins.indexes._mirror.table import Size, TableChoice, make_table


class Position(NamedTuple):
    """How far a mirror has come in the events of one (worker, dp_rank)."""

    generation: str
    seq: int
    lost: bool  # a batch is missing: the mirror is stale until a snapshot comes


class Followed:
    """One (worker, dp_rank). Written by `Mirror`."""

    __slots__ = ("engine", "generation", "lost", "seq")

    def __init__(self, engine: int, generation: str) -> None:
        self.engine = engine  # its number in the table
        self.generation = generation
        self.seq = 0
        self.lost = False


class Mirror:
    """A `TieredIndex` in this process. ResourceError or UserError where the table chosen cannot be had."""

    def __init__(self, clock: Clock, table: TableChoice = "auto") -> None:
        self._clock = clock
        self._table = make_table(table)
        self._followed: dict[tuple[str, int], Followed] = {}
        self._asked: list[tuple[str, int]] | None = None  # the targets of the last lookup, and their numbers
        self._numbers: list[int] = []

    @property
    def table(self) -> str:
        """Which one it is: "native" or "python"."""
        return self._table.kind

    def join(self, info: WorkerInfo) -> None:
        self.leave(info.id)
        for rank in range(info.dp_ranks):
            self._followed[info.id, rank] = Followed(self._table.join(info), info.generation)

    def leave(self, worker: str) -> None:
        self._asked = None
        for key in [key for key in self._followed if key[0] == worker]:
            self._table.leave(self._followed.pop(key).engine)

    def apply(self, batch: EventBatch) -> bool:
        followed = self._followed.get((batch.worker, batch.dp_rank))
        if followed is None:
            return False
        if batch.generation != followed.generation:
            self._begin(followed, batch.generation)  # another life of the worker: what it held is gone
            followed.lost = True
        if followed.lost:
            return False
        if batch.seq <= followed.seq:
            return True  # a snapshot held it already
        if batch.seq != followed.seq + 1:
            followed.lost = True
            return False
        self._table.feed(followed.engine, batch.events)
        followed.seq = batch.seq
        return True

    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        followed = self._followed.get((worker, dp_rank))
        if followed is None:
            return  # it left while its snapshot was on the way
        if generation != followed.generation:
            self._begin(followed, generation)
        else:
            self._table.clear(followed.engine)
        followed.seq, followed.lost = seq, False
        self._table.feed(followed.engine, events)

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        followed = self._followed.get((worker, dp_rank))
        if followed is None or not hashes:
            return
        if ttl <= 0:
            self._table.take_back(followed.engine, hashes)
        else:
            self._table.predict(followed.engine, hashes, self._clock.time() + ttl)

    def overlaps(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        return self._table.usable(hashes, self._numbered(targets), self._clock.time())

    def loadable(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        return self._table.loadable(hashes, self._numbered(targets), self._clock.time())

    def position(self, worker: str, dp_rank: int) -> Position | None:
        """None: it has not joined."""
        followed = self._followed.get((worker, dp_rank))
        return None if followed is None else Position(followed.generation, followed.seq, followed.lost)

    @property
    def size(self) -> Size:
        return self._table.size()

    def close(self) -> None:
        for worker in {worker for worker, _ in self._followed}:
            self.leave(worker)

    def _begin(self, followed: Followed, generation: str) -> None:
        self._table.clear(followed.engine)
        self._table.forget(followed.engine)
        followed.generation = generation

    def _numbered(self, targets: list[tuple[str, int]]) -> list[int]:
        if targets != self._asked:  # mostly they are those of the last request
            found = [self._followed.get(target) for target in targets]
            self._numbers = [-1 if one is None else one.engine for one in found]
            self._asked = list(targets)
        return self._numbers
