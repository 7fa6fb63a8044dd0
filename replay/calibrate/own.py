"""Observes an engine of our own: its deployment started with a step log, probes run through its gateway."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bien.core.clock import WallClock
from bien.core.costs.observed import Observed, StepRecord, by_place, read_steps
from bien.core.deployment import Deployment
from bien.core.errors import BienError
from bien.core.worker.messages import WorkerInfo
from bien.replay.cache_account import CacheAccount
from bien.replay.calibrate.probes import Batch, Reach, batches, sessions
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from bien.replay.processes import OnStep
from bien.replay.record import TurnRecord
from bien.replay.stack_process import StackProcess
from bien.replay.target import Target
from bien.replay.targets.http import HttpTarget

TOKENS = 75_000  # prompt tokens of all probes
CONTEXT = 4096  # of one session: what an engine of this machine is asked at most
OnBatch = Callable[[Batch, int, int], None]  # which, how many are done, of how many
_WARM = Batch(1, 32)


async def observe(
    deployment: Deployment,
    on_step: OnStep,
    on_batch: OnBatch,
    *,
    tokens: int = TOKENS,
    context: int = CONTEXT,
) -> list[Observed]:
    """Steps by place, and the ways of requests that ran alone. BienError: it does not start, or a probe
    failed."""
    clock = WallClock()
    with tempfile.TemporaryDirectory(prefix="bien-steps-") as folder:
        logged = tuple(msgspec.structs.replace(pool, step_log=folder) for pool in deployment.pool)
        stack = await StackProcess.start(msgspec.structs.replace(deployment, pool=logged), on_step)
        records: list[TurnRecord] = []
        try:
            up = stack.up
            target = await HttpTarget.connect(
                up.url, clock, vocab_size=min(w.vocab_size for w in up.workers), accelerators=up.accelerators
            )
            try:
                await _probe(target, clock, _WARM, 0)
                began = clock.time()
                planned = batches(_reach(up.workers, tokens, context))
                for number, batch in enumerate(planned):
                    on_batch(batch, number, len(planned))
                    found = await _probe(target, clock, batch, number + 1)
                    records += found if batch.sessions == 1 else []
            finally:
                await target.close()
        finally:
            await stack.stop()
        steps = [s for file in sorted(Path(folder).glob("*.jsonl")) for s in read_steps(file)]
    steps = [s for s in steps if s.ended - s.seconds >= began]
    return [*by_place(steps), *_ways(records, steps)]


async def _probe(target: Target, clock: WallClock, batch: Batch, number: int) -> list[TurnRecord]:
    options = ReplayOptions(concurrency=batch.sessions, time_scale=0.0)
    driver = Driver(target, clock, sessions(batch, number), options, CacheAccount(1))
    await driver.run()
    for record in driver.records:
        if record.error:
            raise BienError(f"a probe of {record.prompt_tokens} tokens failed: {record.error}")
    return driver.records


def _reach(workers: Sequence[WorkerInfo], tokens: int, context: int) -> Reach:
    return Reach(
        sessions=sum(w.slots for w in workers),
        context=min(context, *(w.max_context for w in workers)),
        cache=sum(w.capacity_tokens for w in workers),
        tokens=tokens,
    )


def _ways(records: Sequence[TurnRecord], steps: Sequence[StepRecord]) -> list[Observed]:
    """What is left of the time to first token of a request that ran alone when its steps are taken away:
    gateway, engine and client share the machine's monotonic clock."""
    out = []
    for record in records:
        own = sum(s.seconds for s in steps if record.sent < s.ended <= record.first)
        way = record.first - record.sent - own
        if own and way > 0:
            place = f"way/{record.prompt_tokens.bit_length()}"
            out.append(Observed(way, (), place, requests=1, prompt_tokens=record.prompt_tokens))
    return out
