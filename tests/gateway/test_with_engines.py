"""The gateway over real engines on virtual time: what it predicts is what the engines find."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from bien.core.clock import VirtualClock
from bien.core.engine import Engine, EngineLimits
from bien.core.executors.simulated import SimulatedExecutor
from bien.core.kv.cache import KVCache
from bien.core.request import BlockRuns, GenerateRequest, SamplingParams
from bien.core.testing.harness import toy_groups
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.messages import WorkerInfo
from bien.gateway.core import Gateway
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig

MakeGateway = Callable[..., Gateway]
CLOCK = VirtualClock()
SLOTS = 4


def worker(id: str, kinds: str, blocks: int) -> InProcessClient:
    groups = toy_groups(kinds)
    sizes = tuple(blocks if g.paged else SLOTS + 6 for g in groups)
    executor = SimulatedExecutor(groups, lambda plan: 0.01 + 0.001 * plan.tokens, 50, virtual=True)
    executor.allocate(sizes, SLOTS, 512)
    engine = Engine(
        scheduler=Fcfs(FcfsConfig(token_budget=32)),
        cache=KVCache(groups, sizes, 4, SLOTS),
        groups=groups,
        limits=EngineLimits(SLOTS, 512, 4),
        clock=CLOCK,
        rng=random.Random(0),
    )
    info = WorkerInfo(
        id,
        f"{id}.1",
        "fp",
        block_tokens=4,
        max_context=512,
        group_kinds=tuple(g.kind.value for g in groups),
        group_windows=tuple(g.window for g in groups),
        snapshot_tokens=tuple(g.snapshot.every_tokens for g in groups),
    )
    return InProcessClient(info, engine, executor, CLOCK)


async def job(gateway: Gateway, session: int, turns: int, rng: random.Random, pause: float) -> None:
    """An agent: each turn sends the last prompt, its output, and a little more."""
    content = BlockRuns.of([(0, 20), (session * 100_000 + 100, rng.randint(1, 30))])
    for turn in range(turns):
        count = rng.randint(1, 25)
        new = session * 100_000 + 1000 * (turn + 1)
        output = BlockRuns.of([(new, count)])
        work = GenerateRequest(
            f"s{session}t{turn}",
            content,
            SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
            session=f"s{session}",
            forced=output,
        )
        async with gateway.generate(work) as stream:
            total = 0
            async for chunk in stream:
                total += chunk.count
            assert total == count
        content = content.join(output).join(BlockRuns.of([(new + 500, rng.randint(1, 10))]))
        await CLOCK.sleep(pause * rng.random())


@pytest.mark.parametrize("kinds", ["full", "full+window", "full+state", "full+window+state+draft"])
@pytest.mark.parametrize("blocks", [400, 60])
def test_one_after_the_other_parity_is_exact(make_gateway: MakeGateway, kinds: str, blocks: int) -> None:
    async def main() -> None:
        workers = [worker(f"w{i}", kinds, blocks) for i in range(2)]
        gateway = make_gateway(*workers)
        rng = random.Random(1)
        for session in (1, 2, 3, 1, 2, 3):
            await job(gateway, session, 4, rng, 1.0)
        totals = gateway.totals
        assert totals.finished == {"length": 24}
        assert totals.cached_tokens > 100
        assert (totals.overpredicted_tokens, totals.underpredicted_tokens) == (0, 0)
        assert gateway._feed.resyncs == 0
        for client in workers:
            client.engine.check_integrity()
        await gateway.close()

    VirtualClock.run(main())


@pytest.mark.parametrize("kinds", ["full", "full+state"])
def test_the_index_equals_the_pools_after_a_crowd(make_gateway: MakeGateway, kinds: str) -> None:
    async def main() -> None:
        workers = [worker(f"w{i}", kinds, 60) for i in range(3)]
        gateway = make_gateway(*workers)
        jobs = [job(gateway, s, 4, random.Random(s), 0.5) for s in range(1, 9)]
        await asyncio.gather(*jobs)
        await CLOCK.sleep(60.0)  # predictions have expired
        for session in range(1, 9):
            probe = GenerateRequest("probe", BlockRuns.of([(0, 20), (session * 100_000 + 100, 30)]))
            assert gateway._chains is not None
            gateway._chains.name(probe)
            targets = [(w.info.id, 0) for w in workers]
            pools = [w.engine.cache.match(probe.hashes).blocks for w in workers]
            assert gateway._index.overlaps(probe.hashes, targets) == pools
        assert any(w.engine.cache.usage(0)[1] > 50 for w in workers)  # of 60: it was crowded
        assert sum(gateway.totals.placements.values()) == 32
        assert len(gateway.totals.placements) == 3
        await gateway.close()

    VirtualClock.run(main())


def test_a_death_in_the_middle_loses_nothing_that_had_not_streamed(make_gateway: MakeGateway) -> None:
    async def main() -> None:
        workers = [worker(f"w{i}", "full", 400) for i in range(2)]
        gateway = make_gateway(*workers)
        jobs = [asyncio.create_task(job(gateway, s, 1, random.Random(s), 0.0)) for s in range(1, 9)]
        await CLOCK.sleep(0.005)
        workers[0].kill()
        await asyncio.gather(*jobs)
        assert gateway.totals.replaced > 0
        assert gateway.totals.finished == {"length": 8}
        workers[1].engine.check_integrity()
        await gateway.close()

    VirtualClock.run(main())
