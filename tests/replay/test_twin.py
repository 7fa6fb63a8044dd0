"""The twin test: one trace, live and simulated, gives the same plans and the same cached tokens.

Live = the torch executor on the wall clock and materialised prompts; simulated = the cost function on the
virtual clock and runs. One session tree at a time, sub-agents one by one, so that time decides nothing.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bien.core.build import BuiltWorker, build
from bien.core.clock import VirtualClock, WallClock
from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.plan import ExecutorPlan
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.core.worker.inprocess import InProcessClient
from bien.gateway.core import Gateway
from bien.replay.cache_account import CacheAccount
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from bien.replay.record import TurnRecord
from bien.replay.target import Target, TargetInfo, TurnRequest
from bien.replay.targets.gateway import GatewayTarget
from bien.traces.materialize import Materializer
from bien.traces.model import Session
from bien.traces.synthesize import SynthesisParameters, synthesize

Plans = list[tuple[Any, ...]]


def sessions() -> list[Session]:
    shape = SynthesisParameters(
        sessions=3,
        system_tokens=70,
        agent_system_tokens=40,
        task_tokens=(10, 40),
        turns=(3, 4),
        result_tokens=(5, 40),
        output_tokens=(2, 20),
        gap_seconds=(0.0, 0.0),
        agents=(1, 1),
        agent_turns=(2, 2),
    )
    return list(synthesize(shape))


class Watched:
    """Notes what each plan computes: slots, positions and counts, new slots, block tables."""

    def __init__(self, executor: Any, plans: Plans) -> None:
        self._executor, self._plans = executor, plans

    def forward(self, plan: ExecutorPlan) -> Any:
        tables = [(t.slots.tolist(), t.index.tolist(), t.blocks.tolist()) for t in plan.tables]
        self._plans.append(
            (
                plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(),
                [(n.slot, len(n.tokens)) for n in plan.new], plan.released.tolist(), tables,
                plan.restores, plan.snapshots,
            )
        )  # fmt: skip
        return self._executor.forward(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class Materialised:
    """The live side: the same gateway, but prompts and forced tokens are ids."""

    def __init__(self, gateway: Gateway, info: TargetInfo, vocabulary: int) -> None:
        self.info = info
        self._gateway = gateway
        self._ids = Materializer(vocabulary, 0)

    async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
        work = GenerateRequest(
            request.id,
            self._ids.tokens(request.prompt, request.scope),
            SamplingParams(len(request.output), temperature=0.0, ignore_eos=True),
            request.tenant,
            request.session,
            forced=self._ids.tokens(request.output, request.scope),
        )
        async with self._gateway.generate(work) as stream:
            async for output in stream:
                record.chunk(self._gateway.clock.time(), output.count)
            record.cached = stream.cached

    async def close(self) -> None: ...


def deployment(folder: Path, kv_tokens: int) -> Deployment:
    pool = PoolSpec(count=1, kv_tokens=kv_tokens, slots=4, scheduler=Selection("fcfs", {"token_budget": 48}))
    return Deployment(ModelSpec(str(folder)), GatewaySpec(), (pool,))


async def run(deployed: Deployment, clock: Any, plans: Plans) -> list[TurnRecord]:
    composition = compose(deployed, PluginManager.load())
    pool = composition.pools[0]
    made: BuiltWorker = build(pool, id="w", generation="g", clock=clock, rng=random.Random(0))
    client = InProcessClient(made.info, made.engine, Watched(made.executor, plans), clock, jump=False)
    ctx = Context(clock=clock, rng=random.Random(0))
    router, index = (composition.gateway[kind].make(ctx) for kind in ("router", "kv_index"))
    gateway = Gateway([client], router, index, clock, composition.spec)
    info = TargetInfo(max_context=gateway.max_context)
    target: Target = GatewayTarget(gateway, info)
    if not clock.virtual:
        target = Materialised(gateway, info, made.info.vocab_size)
    options = ReplayOptions(concurrency=1)
    driver = Driver(target, clock, iter(sessions()), options, CacheAccount(made.info.block_tokens))
    await driver.run()
    made.engine.check_integrity()
    await gateway.close()
    return driver.records


@pytest.mark.parametrize("model", ["llama", "hybrid"])
@pytest.mark.parametrize("kv_tokens", [8192, 512])
def test_live_and_simulated_runs_plan_alike(model: str, kv_tokens: int, tmp_path: Path) -> None:
    """With 512 tokens of KV blocks are evicted all the time: the same ones."""
    folder = write_toy(tmp_path / "m") if model == "llama" else write_tiny_hybrid(tmp_path / "m")
    deployed = deployment(folder, kv_tokens)
    live_plans: Plans = []
    live = asyncio.run(run(deployed, WallClock(), live_plans))
    virtual = deployment(folder, kv_tokens)
    pools = tuple(msgspec.structs.replace(p, executor=Selection("simulated")) for p in virtual.pool)
    simulated_plans: Plans = []
    simulated = VirtualClock.run(
        run(Deployment(virtual.model, virtual.gateway, pools), VirtualClock(), simulated_plans)
    )
    assert len(live) == sum(s.turns for s in sessions()) > 10
    assert [(r.session, r.stream, r.turn, r.cached, r.got, r.error) for r in live] == [
        (r.session, r.stream, r.turn, r.cached, r.got, r.error) for r in simulated
    ]
    assert sum(r.cached for r in live) > 0
    assert live_plans == simulated_plans
