"""`Tap`: what a worker's own events and reports say, heard before the index hears them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.worker.messages import WorkerStats
from bien.gateway.verify.recent import Recent

CLEARED = b"cleared"  # among names: everything
PROMPTS = 32  # that are looked at


class Names(NamedTuple):
    told: bool  # whether events told of any blocks
    depths: Sequence[int]  # of each prompt: its first blocks that they told of
    lengths: Sequence[int]  # and all of its blocks


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


class Tap:
    """Of one rank of a worker. What it heard of gaps and restarts counts until its index was set anew."""

    def __init__(self, generation: str, dp_rank: int = 0, first: Tap | None = None) -> None:
        """`first`: of the worker's first rank, which knows what was sent to all of them."""
        self.stored = Recent()
        self.removed = Recent()
        self.sent: Recent = Recent() if first is None else first.sent  # prompts, when they were placed
        # Prompts, when they were computed or given up.
        self.started: Recent = Recent() if first is None else first.started
        self.gap = ""  # numbers that are missing, in words
        self.restart = ""  # how it was seen
        self.listeners: list[list[KVEvent]] = []  # what is heard while a probe runs
        self._generation = generation
        self._dp_rank = dp_rank
        self._seq: int | None = None
        self._steps = 0

    def heard(self, batch: EventBatch, now: float) -> None:
        if batch.dp_rank != self._dp_rank:
            return  # each rank counts for itself
        if batch.generation != self._generation:
            self.restart = f"its events are of generation {batch.generation}, after {self._generation}"
            self._generation = batch.generation
            self.removed.add(now, CLEARED)
        elif self._seq is not None and batch.seq <= self._seq:
            self.restart = f"its events begin again at number {batch.seq}, after {self._seq}"
        elif self._seq is not None and batch.seq != self._seq + 1:
            self.gap = f"its events {self._seq + 1} to {batch.seq - 1} never came"
        self._seq = batch.seq
        for event in batch.events:
            if event.op == "stored":
                self.stored.add(now, event.hashes)
            else:
                self.removed.add(now, event.hashes or CLEARED)
        for listener in self.listeners:
            listener.extend(batch.events)

    def reported(self, stats: WorkerStats) -> None:
        if stats.steps < self._steps:
            self.restart = f"it has taken {stats.steps} steps, after {self._steps}"
        self._steps = stats.steps

    def names(self) -> Names:
        """What events called the prompts that were computed lately."""
        told = {name for run in self.stored.told() for name in split(run)}
        prompts = [split(chain) for chain in self.started.told()[-PROMPTS:]]
        depths = [next((i for i, n in enumerate(c) if n not in told), len(c)) for c in prompts]
        return Names(bool(told), depths, [len(chain) for chain in prompts])

    def settled(self) -> None:
        """The index was set to a snapshot."""
        self.gap = self.restart = ""
