"""Agents: sessions whose prompts grow from turn to turn, of several tenants, over some workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from bien.core.clock import VirtualClock
from bien.core.deployment import GatewaySpec
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.client import WorkerClient
from bien.gateway.core import Gateway
from bien.gateway.index import KVIndex
from bien.gateway.verify.options import VerifyOptions
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter

CLOCK = VirtualClock()
TENANTS = ("", "a", "b", "c")


def make(
    workers: Sequence[WorkerClient],
    options: VerifyOptions | None,
    index: KVIndex | None = None,
    metrics: CollectorRegistry | None = None,
) -> Gateway:
    router = KVAwareRouter(KVAwareConfig(), random.Random(1))
    spec = GatewaySpec(max_inflight=512, secret="s")
    found = index or MemoryIndex(CLOCK)
    rng = random.Random(2)
    return Gateway(workers, router, found, CLOCK, spec, metrics=metrics, rng=rng, verify=options)


async def session(gateway: Gateway, number: int, turns: int, pause: float, tenants: Sequence[str]) -> None:
    rng = random.Random(number)
    tenant = tenants[number % len(tenants)]
    ids = [*range(100, 130), *(rng.randrange(1000, 30_000) for _ in range(rng.randint(20, 60)))]
    for turn in range(turns):
        await CLOCK.sleep(rng.uniform(0.2, 2.0) * pause)
        sampling = SamplingParams(max_tokens=rng.randint(1, 4))
        work = GenerateRequest(f"{number}.{turn}", TokenIds.of(ids), sampling, tenant, f"s{number}")
        async with gateway.generate(work) as stream:
            async for _ in stream:
                pass
        ids += [rng.randrange(1000, 30_000) for _ in range(rng.randint(3, 30))]


async def run(
    gateway: Gateway,
    sessions: int,
    turns: int = 8,
    *,
    pause: float = 12.0,
    first: int = 0,
    tenants: Sequence[str] = TENANTS,
) -> None:
    await asyncio.gather(*(session(gateway, first + i, turns, pause, tenants) for i in range(sessions)))
