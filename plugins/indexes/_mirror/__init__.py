"""`Mirror`: every worker's cached blocks in this process, fed by their events; what indexes have in common.

Per engine (worker, dp_rank) and KV group it keeps the block hashes that some tier holds. Groups of
every position (full attention and its like) are prefix-closed: a tree of runs, as long as events keep to
that. From the first one that does not they are kept block by block, and their depth in a chain is found by
bisection; closure is verified, not assumed: blocks whose parent is absent are counted, and while there
are any, the chain is walked instead. For groups of a window or a state it asks for the longest position
at which each of them holds, as the engine's own pools do.
"""

from __future__ import annotations

from typing import NamedTuple

from bien.core.api import Clock, EventBatch, KVEvent
from bien.gateway.api import WorkerInfo
from bien.plugins.indexes._mirror.chain import Chain
from bien.plugins.indexes._mirror.engine import Engine, Prediction

MAX_PREDICTIONS = 1024  # per engine; the oldest go first


class Position(NamedTuple):
    """How far a mirror has come in the events of one (worker, dp_rank)."""

    generation: str
    seq: int
    lost: bool  # a batch is missing


class Mirror:
    """A `KVIndex` in this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._engines: dict[tuple[str, int], Engine] = {}

    def join(self, info: WorkerInfo) -> None:
        self.leave(info.id)
        for rank in range(info.dp_ranks):
            self._engines[info.id, rank] = Engine(info)

    def leave(self, worker: str) -> None:
        for key in [key for key in self._engines if key[0] == worker]:
            del self._engines[key]

    def apply(self, batch: EventBatch) -> bool:
        engine = self._engines.get((batch.worker, batch.dp_rank))
        if engine is None:
            return False
        if batch.generation != engine.generation:
            engine.clear()  # another life of the worker: what it held is gone
            engine.predictions = []
            engine.generation = batch.generation
            engine.lost = True
        if engine.lost:
            return False
        if batch.seq <= engine.seq:
            return True  # a snapshot held it already
        if batch.seq != engine.seq + 1:
            engine.lost = True
            return False
        engine.feed(batch.events)
        engine.seq = batch.seq
        return True

    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        engine = self._engines.get((worker, dp_rank))
        if engine is None:
            return  # it left while its snapshot was on the way
        if generation != engine.generation:
            engine.predictions = []
        engine.clear()
        engine.generation, engine.seq, engine.lost = generation, seq, False
        engine.feed(events)

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        engine = self._engines.get((worker, dp_rank))
        if engine is None or not hashes:
            return
        if ttl <= 0:
            engine.take_back(hashes)
            return
        engine.predictions.append(Prediction(hashes, self._clock.time() + ttl))
        del engine.predictions[:-MAX_PREDICTIONS]

    def overlaps(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        chain, now = Chain(hashes), self._clock.time()
        out = []
        for target in targets:
            engine = self._engines.get(target)
            out.append(engine.predicted(chain, engine.usable(chain), now) if engine else 0)
        return out

    def position(self, worker: str, dp_rank: int) -> Position | None:
        """None: it has not joined."""
        engine = self._engines.get((worker, dp_rank))
        return None if engine is None else Position(engine.generation, engine.seq, engine.lost)

    def close(self) -> None:
        self._engines.clear()
