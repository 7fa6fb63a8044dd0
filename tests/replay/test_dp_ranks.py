"""A deployment whose one worker has two engines: real processes, a real model, and what becomes of a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.errors import UserError
from bien.core.kv.hashing import extend_chain, tenant_key
from bien.core.plugins import PluginManager
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.toy import write_toy
from bien.core.worker.launch import launch
from bien.replay.fleet import lasting_starts
from bien.replay.options import ReplayOptions
from bien.replay.route.explain import RoutePlan, prepared
from bien.replay.simulation import SimulationPlan, simulate, simulated
from bien.replay.stack import Stack, open_index
from bien.traces.model import TraceMeta
from bien.traces.native import write_native
from tests.redis_process import redis_process
from tests.replay.fakes import session


class Answer(NamedTuple):
    tokens: list[int]
    rank: int
    predicted: int
    cached: int


def deployed(model: Path, **pool: object) -> Deployment:
    router = Selection("kv-aware", {"fair": 0.0, "learn": False})
    spec = PoolSpec(kv_tokens=4096, slots=4, threads=1, **pool)  # type: ignore[arg-type]
    return Deployment(ModelSpec(str(model)), GatewaySpec(port=0, router=router), (spec,))


def prompt_of(first: int) -> TokenIds:
    return TokenIds.of((first * 7 + n * n) % 250 for n in range(100))


async def ask(stack: Stack, first: int, output: int = 8) -> Answer:
    prompt = prompt_of(first)
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    cached = -1
    async with stack.gateway.generate(GenerateRequest(f"r{first}", prompt, sampling)) as stream:
        async for out in stream:
            tokens += TokenIds(out.tokens).ids().tolist()
            cached = max(cached, out.cached)
        simulated = stack.composition.pools[0].spec.executor.use == "simulated"
        return Answer([] if simulated else tokens, stream.dp_rank, stream.decision.predicted_cached, cached)


async def all_of(stack: Stack, prompts: range) -> list[Answer]:
    return await asyncio.gather(*(ask(stack, n) for n in prompts))


@pytest.mark.parametrize("executor", ["simulated", pytest.param("torch", marks=pytest.mark.slow)])
def test_two_engines_in_one_worker(tmp_path: Path, executor: str) -> None:
    """Exactness is the business of `torch`: what is simulated makes tokens up."""
    write_toy(tmp_path / "toy")

    async def main() -> None:
        expected = None
        if executor == "torch":
            single = await Stack.start(deployed(tmp_path / "toy"))
            expected = [a.tokens for a in await all_of(single, range(6))]
            await single.close()
        of = deployed(tmp_path / "toy", dp_ranks=2, executor=Selection(executor))
        stack = await Stack.start(of)
        [info] = stack.workers
        assert info.dp_ranks == 2 and stack.accelerators == 2
        cold = await all_of(stack, range(6))
        expected = expected or [a.tokens for a in cold]
        assert [a.tokens for a in cold] == expected, "whichever engine it was"
        assert {a.rank for a in cold} == {0, 1}, "they share the work"
        assert all(a.cached == 0 for a in cold)
        await stack.gateway.warm(5)
        for n, before in enumerate(cold):
            again = await ask(stack, n)
            assert again == Answer(before.tokens, before.rank, 96, 96), "sent where it is, and found there"

        os.kill(info.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not (stack.workers and stack.workers[0].generation != info.generation):
                await asyncio.sleep(0.02)
        after = await all_of(stack, range(6))
        assert [a.tokens for a in after] == expected
        assert {a.rank for a in after} == {0, 1}
        assert all((a.predicted, a.cached) == (0, 0) for a in after), "nothing of the former life counts"
        await stack.close()

    asyncio.run(main())


@pytest.mark.slow  # three starts of processes
def test_another_gateway_learns_from_redis_what_each_engine_has(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")

    async def main(url: str) -> None:
        index = Selection("redis", {"url": url, "lease_seconds": 1.0, "poll_seconds": 0.02})
        of = deployed(tmp_path / "toy", dp_ranks=2, executor=Selection("simulated"))
        gateway = msgspec.structs.replace(of.gateway, kv_index=index, secret="shared")
        of = msgspec.structs.replace(of, gateway=gateway)
        composition = compose(of, PluginManager.load())
        async with AsyncExitStack() as opened:
            store = await open_index(composition, None, opened)
            starts = lasting_starts(composition, composition.model, store, "127.0.0.1")
        [worker] = await launch(starts)
        first = await Stack.start(of, attach=True)
        cold = await all_of(first, range(6))
        assert {a.rank for a in cold} == {0, 1}
        await first.close()
        second = await Stack.start(of, attach=True)
        for n, before in enumerate(cold):
            chain = extend_chain(tenant_key("", b"shared"), b"", prompt_of(n), 16, 96)
            wanted = [6 if rank == before.rank else 0 for rank in range(2)]
            async with asyncio.timeout(20):  # workers publish now and then
                while second.gateway._index.overlaps(chain, [("main-0", 0), ("main-0", 1)]) != wanted:
                    await asyncio.sleep(0.01)
            assert await ask(second, n) == before._replace(predicted=96, cached=96)
        await second.close()
        await worker.stop()

    with redis_process() as server:
        asyncio.run(main(server.url))


def test_a_simulated_worker_of_two_engines_is_like_two_workers(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    trace = tmp_path / "t.bien.jsonl"
    sessions = [session(f"s{i}", *((0.3, 40 + 4 * i, 10),) * 4) for i in range(8)]
    write_native(trace, TraceMeta("native", 16), sessions)
    results = []
    for ways in ({"dp_ranks": 2}, {"count": 2}):
        deployment, _ = simulated(deployed(tmp_path / "toy", **ways))
        plan = SimulationPlan((trace,), ReplayOptions(concurrency=4), deployment)
        results.append(simulate(plan, PluginManager.load()).result)
    one, two = results
    assert one.turns.errors == 0 and one.turns.count == 32
    assert one.tokens == two.tokens and one.ttft_ms == two.ttft_ms and one.jobs == two.jobs
    assert one.throughput == two.throughput, "of two accelerators"
    assert one.router.parity == two.router.parity == 1.0
    assert one.router.imbalance == 1.0


def test_placements_are_searched_over_workers_of_one_engine(tmp_path: Path) -> None:
    of = deployed(tmp_path, dp_ranks=2)
    with pytest.raises(UserError, match=r"pool 'main': dp_ranks is 2.*valid: dp_ranks = 1, count = 2"):
        prepared(RoutePlan((), of))
