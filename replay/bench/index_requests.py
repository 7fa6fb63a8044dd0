"""What Redis does for one routed request, all of it: leases, events, snapshots, reservations, looks at them.

Real worker processes and gateways, each with an index of its own; sessions of several turns, at a rate. Redis
itself says what it has spent (INFO cpu) and holds (INFO memory, MEMORY USAGE).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from bien.core.clock import WallClock
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.toy import write_toy
from bien.core.worker.redis_link import close_redis, redis_client
from bien.replay.bench.restart_fleet import Fleet, deployment
from bien.replay.redis_server import RedisServer

TURNS = 16
PROMPT_TOKENS, STEP_TOKENS = 1024, 128  # of a first turn, and what each later one adds
WORKERS, GATEWAYS = 8, 4
AT_ONCE = 256  # requests, where there is no rate
SETTLE_SECONDS, IDLE_SECONDS = 4.0, 8.0
PINGS = 300
PATIENCE = 0.2  # seconds: on a busy machine, too, what is asked for is waited for
COUNTS = ("made", "asked", "contested", "missed")  # of reservations


async def per_request(url: str, rate: float, requests: int, outputs: int) -> dict[str, Any]:
    """At `rate` requests a second over all workers, of `outputs` tokens each; 0: as many as can be served."""
    bare = await _bare()
    with tempfile.TemporaryDirectory() as folder:
        model = write_toy(Path(folder) / "toy", max_position_embeddings=8192)
        costs = {"step_ms": 8.0, "token_ms": 0.05, "row_ms": 0.2}
        index = {"reserve_seconds": PATIENCE}
        fleet = await Fleet.open(
            deployment(model, url, WORKERS, 1 << 17, 9.0, index=index, **costs), GATEWAYS
        )
    client = redis_client(url, 5.0)
    try:
        await WallClock().sleep(SETTLE_SECONDS)
        idle = await _idle(client)
        await _serve(fleet, rate, int(2 * rate) or AT_ONCE, outputs, seed=1)
        before = await client.info("cpu"), await client.info("commandstats"), _counts(fleet)
        clock = WallClock()
        began = clock.time()
        await _serve(fleet, rate, requests, outputs, seed=2)
        seconds = clock.time() - began
        after = await client.info("cpu"), await client.info("commandstats"), _counts(fleet)
        cpu = _spent(after[0]) - _spent(before[0])
        calls = {
            name.removeprefix("cmdstat_"): round((told["calls"] - _calls(before[1], name)) / requests, 3)
            for name, told in after[1].items()
            if told["calls"] > _calls(before[1], name)
        }
        ping = await _pinged(client, requests / seconds)
        blocks, held = await _held(client, fleet)
    finally:
        await close_redis(client)
        await fleet.close()
    return {
        "requests": requests,
        "requests_per_second": round(requests / seconds, 1),
        "redis_us_per_request": round(1e6 * cpu / requests, 1),
        "of_that_a_server_without_clients": round(1e6 * bare * seconds / requests, 1),
        "redis_us_per_second_without_requests": round(1e6 * idle, 1),  # with all leases and looks at them
        "redis_us_per_second_without_clients": round(1e6 * bare, 1),
        "redis_us_per_ping_at_that_rate": round(1e6 * (ping - idle * seconds / requests), 1),
        **{name: now - then for name, now, then in zip(COUNTS, after[2], before[2], strict=True)},
        "calls_per_request": calls,
        "blocks": blocks,
        "redis_bytes_per_block": round(held / max(1, blocks), 1),
    }


async def _bare() -> float:
    """CPU seconds per second of a server of the same kind that nobody uses."""
    server = await RedisServer.start()
    client = redis_client(server.url, 5.0)
    try:
        return await _idle(client)
    finally:
        await close_redis(client)
        await server.stop()


async def _serve(fleet: Fleet, rate: float, requests: int, outputs: int, seed: int) -> None:
    rng, clock = random.Random(seed), WallClock()
    sessions: list[list[int]] = []
    began, room = clock.time(), asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as group:
        for n in range(requests):
            if rate:
                await clock.sleep(began + n / rate - clock.time())
            await room.acquire()
            if len(sessions) < 4 * WORKERS or rng.random() < 1 / TURNS:
                sessions.append([rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)])
                at = len(sessions) - 1
            else:
                at = rng.randrange(max(0, len(sessions) - 8 * WORKERS), len(sessions))
                if len(sessions[at]) < PROMPT_TOKENS + TURNS * STEP_TOKENS:
                    sessions[at] += [rng.randrange(3, 250) for _ in range(STEP_TOKENS)]
            turn = group.create_task(_turn(fleet, n, f"s{seed}.{at}", list(sessions[at]), outputs))
            turn.add_done_callback(lambda _: room.release())


async def _turn(fleet: Fleet, n: int, session: str, tokens: list[int], outputs: int) -> None:
    sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
    request = GenerateRequest(f"r{n}", TokenIds.of(tokens), sampling, session=session)
    async with fleet.sites[n % len(fleet.sites)].gateway.generate(request) as stream:
        async for _ in stream:
            pass


async def _held(client: Any, fleet: Fleet) -> tuple[int, int]:
    """Distinct blocks by worker, and bytes of the keys that hold them."""
    await WallClock().sleep(2.0)  # the last snapshots
    blocks = sum(load.stats.cached_blocks for load in fleet.sites[0].gateway.loads)
    size = 0
    async for key in client.scan_iter(match="bien:{*"):
        size += await client.memory_usage(key, samples=0) or 0
    return blocks, size


async def _idle(client: Any) -> float:
    before = _spent(await client.info("cpu"))
    await WallClock().sleep(IDLE_SECONDS)
    return (_spent(await client.info("cpu")) - before) / IDLE_SECONDS


async def _pinged(client: Any, rate: float) -> float:
    before = _spent(await client.info("cpu"))
    for _ in range(PINGS):
        await client.ping()
        await WallClock().sleep(1 / rate)
    return (_spent(await client.info("cpu")) - before) / PINGS


def _spent(cpu: dict[str, Any]) -> float:
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def _counts(fleet: Fleet) -> list[int]:
    reservers = [site.index.reserver for site in fleet.sites]
    return [sum(getattr(reserver, name) for reserver in reservers) for name in COUNTS]


def _calls(stats: dict[str, Any], name: str) -> int:
    return int(stats.get(name, {}).get("calls", 0))
