"""A worker that dies at the points of points.py: the real process, server and engine, a hash for a model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from bien.core.clock import WallClock
from bien.core.engine import Engine, EngineLimits
from bien.core.kv.cache import KVCache
from bien.core.plan import ExecutorPlan, StepResult
from bien.core.providers import Context
from bien.core.report import StepReport
from bien.core.request import GenerateRequest
from bien.core.sequence import Status
from bien.core.testing.harness import toy_groups
from bien.core.testing.hash_executor import HashExecutor
from bien.core.worker import server
from bien.core.worker.messages import FromWorker, PromptPart, StepFrame, WorkerInfo
from bien.core.worker.parts import Assembler
from bien.core.worker.start import WorkerStart
from bien.plugins.kv_stores.host import HostConfig, make
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.speculators.prompt_lookup import PromptLookup, PromptLookupConfig
from tests.replay.kill.points import Point, reach

BLOCK = 16
CONTEXT = 24_000
VOCAB = 267  # of the byte-level toy tokenizer
TOKEN_BUDGET = 256
STEP_SECONDS = 0.001  # so that requests overlap
DECODED = 3  # output tokens that DECODING waits for
GROUPS = toy_groups("full", block_tokens=BLOCK)

Doom = tuple[Point, str]


class MortalExecutor(HashExecutor):
    """Computes on a thread of its own, as accelerators do, so that two steps are in flight."""

    def __init__(self) -> None:
        super().__init__(GROUPS)
        self.doomed: dict[int, list[Doom]] = {}  # steps in whose middle somebody dies; by the engine's thread
        self._thread = ThreadPoolExecutor(1)

    def forward(self, plan: ExecutorPlan) -> ExecutorPlan:
        return plan

    def sample(self, handle: ExecutorPlan, masks: Any = None) -> Future[StepResult]:
        return self._thread.submit(self._compute, handle)

    def close(self) -> None:
        self._thread.shutdown()

    def _compute(self, plan: ExecutorPlan) -> StepResult:
        time.sleep(STEP_SECONDS)
        handle = super().forward(plan)
        for point, session in self.doomed.pop(plan.step, ()):
            reach(point, session)
        return super().sample(handle).result()


class MortalEngine(Engine):
    def __init__(self, executor: MortalExecutor, **parts: Any) -> None:
        super().__init__(**parts)
        self._executor = executor
        self._marked: dict[str, str] = {}  # engine id -> session
        self._silent: set[str] = set()  # of these: no token yet

    def submit(self, request: GenerateRequest) -> None:
        if request.session:
            reach(Point.RECEIVED, request.session)
            self._marked[request.id] = request.session
            self._silent.add(request.id)
        super().submit(request)

    def abort(self, id: str) -> None:
        if id in self._marked:
            reach(Point.ABORTING, self._marked[id])
        super().abort(id)

    def begin(self) -> ExecutorPlan | None:
        plan = super().begin()
        for id in self._marked.keys() & self._sequences.keys():
            if self._sequences[id].status is Status.WAITING:
                reach(Point.WAITING, self._marked[id])
            if self._sequences[id].status is Status.LOADING:
                reach(Point.LOADING, self._marked[id])
        if plan is not None:
            self._executor.doomed[plan.step] = self._dooms()
        return plan

    def _dooms(self) -> list[Doom]:
        dooms = []
        for item in self._flights[-1].items:
            s = item.sequence
            if item.start > 0 and item.start + item.count < s.prompt_tokens:
                dooms.append((Point.PREFILL, s.request.session))
            if item.drafts and s.output_tokens >= DECODED:
                dooms.append((Point.DECODING, s.request.session))
        return dooms

    def finish(self, result: StepResult) -> StepReport:
        report = super().finish(result)
        for output in report.outputs:
            if output.id in self._silent and output.count:
                self._silent.discard(output.id)
                reach(Point.SAMPLED, self._marked[output.id])
        return report

    def snapshot(self) -> list[Any]:
        reach(Point.SNAPSHOT)
        return super().snapshot()


class MortalServer(server.Server):
    def __init__(self, info: WorkerInfo, token: str) -> None:
        super().__init__(info, token)
        self.sessions: dict[tuple[int, int], str] = {}

    def submit(self, client: int, rid: int, request: GenerateRequest) -> None:
        if request.session:
            self.sessions[client, rid] = request.session
        super().submit(client, rid, request)


class MortalGateway(server._Gateway):
    _server: MortalServer

    def __init__(self, of: server.Server) -> None:
        super().__init__(of)
        self._assembler = MortalAssembler()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        reach(Point.JOINING)
        super().connection_made(transport)

    def send(self, message: FromWorker) -> None:
        begun = []
        if isinstance(message, StepFrame):
            for output in message.outputs:
                session = self._server.sessions.get((self.client, output.rid), "")
                if session and output.finish is not None:
                    reach(Point.FINISHING, session)
                if session and output.count and output.cached >= 0:
                    begun.append(session)
        super().send(message)
        for session in begun:
            self._once_sent(session)

    def _once_sent(self, session: str) -> None:
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_soon(self._once_sent, session)
        else:
            reach(Point.STREAMING, session)


class MortalAssembler(Assembler):
    def add(self, part: PromptPart) -> GenerateRequest | None:
        whole = super().add(part)
        if whole is None and part.rid in self._open:
            reach(Point.HALF_SENT, self._open[part.rid][0].request.session)
        return whole


def build(start: WorkerStart, progress: Callable[[str], None]) -> SimpleNamespace:
    """A builder for worker processes. It runs in a process of its own, which serves nothing else."""
    reach(Point.STARTING)
    from bien.core.worker import main

    main.Server = MortalServer  # type: ignore[misc]
    server._Gateway = MortalGateway  # type: ignore[misc]
    slots, blocks = start.pool.slots, (start.pool.kv_tokens // BLOCK,)
    executor = MortalExecutor()
    executor.allocate(blocks, slots, CONTEXT)
    clock = WallClock()
    store = None
    if start.pool.kv_store is not None:
        store = make(HostConfig(), Context(clock=clock, rng=random.Random(0), groups=GROUPS, io=executor.io))
    engine = MortalEngine(
        executor,
        scheduler=Fcfs(FcfsConfig(token_budget=TOKEN_BUDGET)),
        cache=KVCache(GROUPS, blocks, BLOCK, slots),
        groups=GROUPS,
        limits=EngineLimits(slots, CONTEXT, BLOCK),
        clock=clock,
        speculator=PromptLookup(PromptLookupConfig(min_ngram=1)),
        store=store,
    )
    info = WorkerInfo(
        start.id,
        f"{random.getrandbits(48):x}-{start.epoch}",
        "hash",
        block_tokens=BLOCK,
        max_context=CONTEXT,
        slots=slots,
        capacity_tokens=blocks[0] * BLOCK,
        vocab_size=VOCAB,
    )
    parts = SimpleNamespace(close=lambda: None)
    return SimpleNamespace(engine=engine, executor=executor, info=info, parts=parts, depth=2, others=())
