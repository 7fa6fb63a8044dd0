"""`FakeWorker`: a scripted `WorkerClient` on a clock, for tests of gateways, shells and drivers.

It serves by itself (prefill at a constant pace, one token per step, a cache without end), or, with
`auto=False`, does only what its test says through `emit`, `event`, `load` and `die`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from bien.core.clock import Clock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.request import GenerateRequest, TokenIds
from bien.core.worker.client import WorkerListener
from bien.core.worker.messages import Output, Snapshot, StepFrame, WorkerInfo, WorkerStats


def fake_info(id: str = "w0", **fields: object) -> WorkerInfo:
    """A worker's hello: 4-token blocks, a context of 1,024 tokens, a vocabulary of 1,000."""
    base = WorkerInfo(
        id, f"{id}.1", "fake", "fake", block_tokens=4, max_context=1024, slots=8, vocab_size=1000
    )
    return msgspec.structs.replace(base, **fields)


class FakeWorker:
    def __init__(
        self,
        clock: Clock,
        id: str = "w0",
        *,
        info: WorkerInfo | None = None,
        auto: bool = True,
        prefill_seconds: float = 0.001,
        step_seconds: float = 0.01,
    ) -> None:
        """`prefill_seconds` are per uncached prompt token, `step_seconds` per output token."""
        self.info = info or fake_info(id)
        self.submitted: list[tuple[int, GenerateRequest]] = []  # copies, as they came
        self.aborted: list[int] = []
        self.closed = False
        self.catch_ups = 0
        self.snapshots = 0
        self.stats = WorkerStats(total_blocks=1000)
        self.seq = 0
        self.cached: dict[bytes, None] = {}  # block hashes in the order in which they were stored
        self._clock = clock
        self._auto = auto
        self._prefill_seconds = prefill_seconds
        self._step_seconds = step_seconds
        self._listener: WorkerListener | None = None
        self._alive = True
        self._tasks: dict[int, asyncio.Task[None]] = {}

    # WorkerClient.

    @property
    def alive(self) -> bool:
        return self._alive

    def attach(self, listener: WorkerListener) -> None:
        self._listener = listener

    def submit(self, rid: int, request: GenerateRequest) -> None:
        self.submitted.append((rid, msgspec.structs.replace(request)))
        if self._auto and self._alive:
            task = asyncio.get_running_loop().create_task(self._serve(rid, request))
            self._tasks[rid] = task
            task.add_done_callback(lambda _: self._tasks.pop(rid, None))

    def abort(self, rid: int) -> None:
        self.aborted.append(rid)
        task = self._tasks.pop(rid, None)
        if task is not None:
            task.cancel()

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        self.snapshots += 1
        seq, events = self.seq, [KVEvent("stored", hashes=h, parent=b"") for h in self.cached]
        await self._clock.sleep(self._step_seconds)  # it is as of now, and arrives later
        return Snapshot(self.info.generation, seq, events)

    def catch_up(self) -> None:
        self.catch_ups += 1

    async def close(self) -> None:
        self.closed = True
        self._stop()

    # The script.

    def emit(
        self,
        rid: int,
        count: int = 1,
        finish: str | None = None,
        *,
        tokens: Sequence[int] = (),
        cached: int = -1,
        error: str = "",
        error_code: str = "",
        times: tuple[float, float] | None = None,
    ) -> None:
        """One frame with one output. `tokens` are made up where none are given."""
        ids = TokenIds.of(tokens or range(count)).packed
        self.send(Output(rid, len(ids) // 4, ids, finish, cached, error, error_code, times))

    def event(self, *events: KVEvent, lose: bool = False) -> None:
        """One batch of KV events; with `lose` it gets a number and never arrives."""
        self.seq += 1
        for event in events:
            hashes = [event.hashes[i : i + HASH_BYTES] for i in range(0, len(event.hashes), HASH_BYTES)]
            if event.op == "stored":
                self.cached.update(dict.fromkeys(hashes))
            else:
                for block in hashes or list(self.cached):
                    self.cached.pop(block, None)
        if not lose:
            batch = EventBatch(self.info.id, 0, self.info.generation, self.seq, list(events))
            self.send(batch=batch)

    def load(self, **fields: float) -> None:
        """Report these figures (the others stay as they are)."""
        self.stats = msgspec.structs.replace(self.stats, **fields)
        self.send(stats=self.stats)

    def send(
        self, *outputs: Output, batch: EventBatch | None = None, stats: WorkerStats | None = None
    ) -> None:
        if self._listener is not None and self._alive:
            self._listener.on_frame(self, StepFrame(list(outputs), batch, stats, self._clock.time()))

    def die(self, reason: str = "it was killed") -> None:
        if self._alive:
            self._stop()
            if self._listener is not None:
                self._listener.on_death(self, reason)

    # Serving by itself.

    async def _serve(self, rid: int, request: GenerateRequest) -> None:
        hashes = request.hashes
        blocks = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
        whole = (request.prompt_tokens - 1) // self.info.block_tokens
        hit = next((i for i, block in enumerate(blocks[:whole]) if block not in self.cached), whole)
        cached = hit * self.info.block_tokens
        await self._clock.sleep(self._prefill_seconds * (request.prompt_tokens - cached))
        fresh = [block for block in blocks if block not in self.cached]
        if fresh:
            at = blocks.index(fresh[0])
            parent = blocks[at - 1] if at else b""
            self.event(KVEvent("stored", parent=parent, hashes=b"".join(fresh)))
        total = request.sampling.max_tokens
        for n in range(total):
            await self._clock.sleep(self._step_seconds)
            finish = "length" if n == total - 1 else None
            self.emit(rid, tokens=[self._token(request, n)], finish=finish, cached=-1 if n else cached)

    def _token(self, request: GenerateRequest, n: int) -> int:
        # The recorded one, else a function of seed and position, as counter-based sampling is.
        if isinstance(request.forced, TokenIds) and n < len(request.forced):
            return int(request.forced.ids()[n])
        return ((request.sampling.seed or 0) * 31 + n * 7) % (self.info.vocab_size or 1000)

    def _stop(self) -> None:
        self._alive = False
        for task in list(self._tasks.values()):
            task.cancel()
