"""A server that stands in for vLLM or SGLang: continuous batching whose steps cost what a `StepModel` says,
with a prefix cache and a metrics page. On a virtual clock its seconds are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from bien.core.architectures.registry import read_architecture
from bien.core.clock import Clock
from bien.core.costs.machine import load_machine
from bien.core.costs.observed import Observed
from bien.core.costs.step import StepModel
from bien.replay.record import TurnRecord
from bien.replay.target import TargetInfo, TurnRequest

BLOCK = 16
WAY, WAY_TOKEN = 0.004, 1e-6  # seconds on a request's way, and per token of its prompt
FACTORS = {
    "products": 1.3,
    "attention": 2.0,
    "host": 3.0,
    "rows": 20.0,
    "head": 0.9,
    "cache_read": 0.5,
    "weights_computed": 0.4,
}


def model(factors: dict[str, float] | None = None) -> StepModel:
    a = read_architecture("llama-3.1-8b", 16, "bfloat16")
    return StepModel(a, load_machine("h100"), factors=factors)


Ran = tuple[tuple[tuple[int, int], ...], int]


def as_ran(starts: Iterable[int], counts: Iterable[int], samples: int) -> Ran:
    """A step, whatever the order of its sequences."""
    return tuple(sorted(zip(starts, counts, strict=True))), samples


@dataclass(eq=False)
class Sequence:
    request: TurnRequest
    record: TurnRecord
    arrived: float
    scheduled: float = -1.0
    at: int = 0  # positions computed
    cached: int = 0
    held: int = 0  # tokens that wait for their chunk
    last: float = -1.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt(self) -> int:
        return len(self.request.prompt)


class StandIn:
    """`info`, `generate`, `metrics` and `close` of a target. What it does beside its work is set by tests."""

    def __init__(self, clock: Clock, engine: str = "vllm", *, chunk: int = 2048, slots: int = 64) -> None:
        self.info = TargetInfo("stand-in", 8192)
        self.engine, self.chunk, self.slots = engine, chunk, slots
        self.model = model(FACTORS)
        self.caches = True
        self.tells = True  # usage says what was cached
        self.interval = 1  # tokens of a chunk
        self.drafts = 0  # per step
        self.ranks = 1
        self.lie: Callable[[str, float], float] = lambda name, value: value
        self.stall: Callable[[int], float] = lambda step: 0.0  # seconds beyond what step n costs
        self.sent: Callable[[TurnRecord], object] = lambda record: None  # a chunk went out
        self.every = 40  # steps between two looks of SGLang at how many run
        self.steps = 0
        self.log: set[Ran] = set()  # what they computed
        self._clock = clock
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._known: set[tuple[str, bytes]] = set()
        self._task: asyncio.Task[None] | None = None
        self._written = 0.0  # running requests, as SGLang counts them: now and then
        self._counted: dict[str, float] = {}

    async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
        record.sent = self._clock.time()
        await self._clock.sleep(WAY + WAY_TOKEN * len(request.prompt))
        await self.enqueue(request, record)

    async def enqueue(self, request: TurnRequest, record: TurnRecord) -> None:
        sequence = Sequence(request, record, self._clock.time())
        self._waiting.append(sequence)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        await sequence.done.wait()

    async def close(self) -> None:
        pass

    async def metrics(self) -> str:
        if not self.engine:
            return ""
        lines = []
        for name, value in self._numbers().items():
            labels = f'model_name="{self.info.model}"'
            for rank in range(self.ranks):
                mark = f'{labels},{"engine" if self.engine == "vllm" else "dp_rank"}="{rank}"'
                part = self.lie(name, value) if not rank else 0.0
                lines.append(f"{self.engine}:{name}{{{mark}}} {part}")
        if self.engine == "vllm":
            lines.append('vllm:cache_config_info{block_size="16",num_gpu_blocks="8192"} 1.0')
        return "\n".join(["# HELP python_info of no concern", "python_info 1.0", *lines, ""])

    def predicted(self, observed: Observed) -> float:
        """What it charges for that."""
        way = observed.requests * WAY + observed.prompt_tokens * WAY_TOKEN
        return way + sum(
            self.model.seconds(np.array(s.starts), np.array(s.counts), s.samples) for s in observed.steps
        )

    def _numbers(self) -> dict[str, float]:
        c = self._counted.get
        sums = {
            name: c(name, 0.0)
            for h in ("time_to_first_token_seconds", "inter_token_latency_seconds")
            for name in (h + "_sum", h + "_count")
        }
        common = {
            "prompt_tokens_total": c("prompt", 0.0),
            "generation_tokens_total": c("output", 0.0),
            **sums,
        }
        if self.engine == "sglang":
            return common | {
                "num_running_reqs": self._written,
                "num_queue_reqs": 0.0,
                "num_requests_total": c("ended", 0.0),
                "cached_tokens_total": c("cached", 0.0),
                "spec_verify_calls_total": c("drafts", 0.0),
                "max_total_num_tokens": 131072.0,
            }
        return common | {
            "num_requests_running": float(len(self._running)),
            "num_requests_waiting": float(len(self._waiting)),
            "request_success_total": c("ended", 0.0),
            "prefix_cache_hits_total": c("cached", 0.0),
            "num_preemptions_total": c("preempted", 0.0),
            "spec_decode_num_drafts_total": c("drafts", 0.0),
            "request_prefill_time_seconds_sum": c("prefill_sum", 0.0),
            "request_prefill_time_seconds_count": c("prefill_count", 0.0),
        }

    async def _run(self) -> None:
        while self._running or self._waiting:
            plan = self._plan()
            starts, counts = np.array([s.at for s, _ in plan]), np.array([n for _, n in plan])
            sampled = [s for s, n in plan if s.at + n >= s.prompt]
            cost = self.model.seconds(starts, counts, len(sampled)) + self.stall(self.steps)
            if self.steps % self.every == 0:
                self._written = float(len(self._running))
            self.steps += 1
            self.log.add(as_ran(starts.tolist(), counts.tolist(), len(sampled)))
            await self._clock.sleep(cost)
            self._count("drafts", self.drafts)
            for s, n in plan:
                s.at += n
            for s in sampled:
                self._token(s)

    def _plan(self) -> list[tuple[Sequence, int]]:
        now = self._clock.time()
        while self._waiting and len(self._running) < self.slots:
            s = self._waiting.pop(0)
            s.scheduled, s.at = now, self._cached(s)
            s.cached = s.at
            s.record.cached = s.cached if self.tells else -1
            self._count("cached", s.cached)
            self._running.append(s)
        budget, plan = self.chunk, []
        prompts = [s for s in self._running if s.at < s.prompt]
        decoding = [s for s in self._running if s.at >= s.prompt]
        if self.engine == "sglang" and prompts:
            decoding = []
        for s in (*decoding, *prompts):
            if n := min(budget, max(1, s.prompt - s.at)):
                plan.append((s, n))
                budget -= n
        return plan

    def _token(self, s: Sequence) -> None:
        now = self._clock.time()
        self._count("output", 1)
        if s.last < 0:
            self._count("prompt", s.prompt)
            self._count("time_to_first_token_seconds_sum", now - s.arrived)
            self._count("time_to_first_token_seconds_count", 1)
            self._count("prefill_sum", now - s.scheduled)
            self._count("prefill_count", 1)
            self._remember(s)
        else:
            self._count("inter_token_latency_seconds_sum", now - s.last)
            self._count("inter_token_latency_seconds_count", 1)
        got = s.record.got + s.held + 1
        s.held += 1
        last = got == len(s.request.output)
        if s.last < 0 or s.held == self.interval or last:
            s.record.chunk(now, s.held)
            self.sent(s.record)
            s.held = 0
        s.last = now
        if last:
            self._running.remove(s)
            self._count("ended", 1)
            s.done.set()

    def _cached(self, s: Sequence) -> int:
        if not self.caches:
            return 0
        whole = (s.prompt - 1) // BLOCK
        key = (s.request.scope, b"")
        for blocks in range(whole, 0, -1):
            key = (s.request.scope, s.request.prompt.content(0, BLOCK * blocks))
            if key in self._known:
                return BLOCK * blocks
        return 0

    def _remember(self, s: Sequence) -> None:
        for blocks in range(1, s.prompt // BLOCK + 1):
            self._known.add((s.request.scope, s.request.prompt.content(0, BLOCK * blocks)))

    def _count(self, name: str, more: float) -> None:
        self._counted[name] = self._counted.get(name, 0.0) + more
