"""Several engines in the gateway's own process as one worker: its dp_ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bien.core.request import GenerateRequest
from bien.core.worker.client import WorkerClient, WorkerListener
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.messages import Snapshot, StepFrame


class InProcessRanks:
    """Implements `WorkerClient` around one client per rank, in their order, which it owns."""

    def __init__(self, ranks: Sequence[InProcessClient]) -> None:
        self.info = ranks[0].info
        self._ranks = ranks
        self._places: dict[int, InProcessClient] = {}  # of requests that have not ended, by rid
        self._listener: WorkerListener | None = None

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self._ranks)

    def attach(self, listener: WorkerListener) -> None:
        self._listener = listener
        for rank in self._ranks:
            rank.attach(self)

    def submit(self, rid: int, request: GenerateRequest) -> None:
        # A rid in use: the engine that has it says so.
        place = self._places.setdefault(rid, self._ranks[request.dp_rank])
        place.submit(rid, request)

    def abort(self, rid: int) -> None:
        place = self._places.pop(rid, None)
        if place is not None:
            place.abort(rid)

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        return await self._ranks[dp_rank].snapshot(dp_rank)

    def catch_up(self) -> None:
        for rank in self._ranks:
            rank.catch_up()

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    def kill(self, reason: str = "killed") -> None:
        """Die without a word, all engines at once."""
        if self.alive:
            self._end()
            if self._listener is not None:
                self._listener.on_death(self, reason)

    # WorkerListener, of the ranks.

    def on_frame(self, worker: WorkerClient, frame: StepFrame) -> None:
        for output in frame.outputs:
            if output.finish is not None:
                self._places.pop(output.rid, None)
        if self._listener is not None:
            self._listener.on_frame(self, frame)

    def on_death(self, worker: WorkerClient, reason: str) -> None:
        """One engine has failed: a worker lives and dies as one."""
        self._end()
        if self._listener is not None:
            self._listener.on_death(self, reason)

    def _end(self) -> None:
        for rank in self._ranks:
            rank.silence()
