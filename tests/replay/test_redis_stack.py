"""Stacks whose index lies in Redis: real gateway and worker processes, a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from bien.core.clock import WallClock
from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.errors import ResourceError
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.core.worker.launch import WorkerProcess, launch
from bien.replay.display import Display
from bien.replay.fleet import lasting_starts
from bien.replay.live import Plan, replay
from bien.replay.options import ReplayOptions
from bien.replay.stack import open_index
from bien.replay.stack_process import StackProcess
from bien.traces.model import TraceMeta
from bien.traces.native import write_native
from tests.redis_process import RedisProcess, redis_process, require_redis
from tests.replay.fakes import session

FAST = {"lease_seconds": 1.0, "poll_seconds": 0.02, "flush_seconds": 0.002}
BLOCK = 16


def deployment(model: Path, url: str, *, count: int = 1, **index: object) -> Deployment:
    """Of simulated workers: real engines, no torch."""
    parameters = {"url": url, **FAST, **index}
    gateway = GatewaySpec(port=0, secret="shared", kv_index=Selection("redis", parameters))
    pool = PoolSpec(count=count, kv_tokens=4096, slots=4, threads=1, executor=Selection("simulated"))
    return Deployment(ModelSpec(str(model), block_tokens=BLOCK), gateway, (pool,))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_toy(tmp_path / "toy")
    return tmp_path / "toy"


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    with redis_process() as process:
        yield process


def sockets() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("bien-redis-")}


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def test_a_replay_with_an_embedded_server(model: Path, tmp_path: Path) -> None:
    require_redis()
    before, left = children(), sockets()
    trace = tmp_path / "t.bien.jsonl"
    write_native(
        trace, TraceMeta("native", 16), [session(f"s{i}", (0, 100, 8), (0.01, 30, 5)) for i in range(2)]
    )
    plan = Plan((trace,), ReplayOptions(concurrency=2), tmp_path / "r.json", deployment(model, "embedded"))
    with Display(WallClock()) as display:
        result, _ = asyncio.run(replay(plan, display))
    assert result.turns.count == 4 and result.turns.errors == 0
    assert result.tokens.cached_input == 2 * 96 and result.router.parity == 1.0
    assert result.deployment["gateway"]["kv_index"]["use"] == "redis"
    assert children() == before and sockets() == left, "the server ends with the stack"


def test_the_embedded_server_ends_with_a_killed_stack(model: Path) -> None:
    require_redis()
    left = sockets()

    async def main() -> None:
        stack = await StackProcess.start(deployment(model, "embedded"))
        gateway = psutil.Process(stack._process.pid)
        below = gateway.children(recursive=True)
        assert any("redis" in p.name() or "valkey" in p.name() for p in below)
        gateway.kill()
        _, alive = psutil.wait_procs(below, timeout=20)
        assert alive == []
        await stack.stop()

    asyncio.run(main())
    assert sockets() == left


def test_a_redis_that_is_away_is_named_at_the_start(model: Path) -> None:
    before = children()
    url = "redis://me:hidden@127.0.0.1:1/0"

    async def start(**parameters: object) -> None:
        await (await StackProcess.start(deployment(model, url, **parameters))).stop()

    with pytest.raises(ResourceError, match=r"Redis at redis://\*\*\*@127.0.0.1:1/0: .*connect") as told:
        asyncio.run(start())
    assert "hidden" not in str(told.value) and "on_failure" in str(told.value)
    asyncio.run(start(on_failure="mirror"))
    assert children() == before


async def fleet(of: Deployment, model: Path) -> list[WorkerProcess]:
    """Its workers, started here, so that they outlive gateways."""
    from contextlib import AsyncExitStack

    composition = compose(of, PluginManager.load())
    async with AsyncExitStack() as opened:
        index = await open_index(composition, None, opened)
        starts = lasting_starts(composition, composition.model, index, "127.0.0.1")
    return await launch(starts)


async def turn(
    session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int = 4
) -> dict[str, Any]:
    body = {"model": "toy", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        usage: dict[str, Any] = (await answer.json())["usage"]
        return usage


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith((f"{name} ", f"{name}_total ")):
                return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def prompt(number: int, turns: int) -> list[int]:
    """What a session has said until its turn; each one adds 48 tokens."""
    return [(number * 97 + n * 7) % 90 + 5 for n in range(48 * turns)]


async def test_a_killed_gateway_is_replaced_and_knows_all_that_it_knew(
    model: Path, server: RedisProcess
) -> None:
    of = deployment(model, server.url, count=2)
    workers = await fleet(of, model)
    first = second = None
    try:
        first = await StackProcess.start(of, attach=True)
        async with aiohttp.ClientSession() as http:
            for number in range(6):
                usage = await turn(http, first.up.url, prompt(number, 1))
            for number in range(6):
                usage = await turn(http, first.up.url, prompt(number, 2))
                assert usage["prompt_tokens_details"]["cached_tokens"] == 48
            streaming = asyncio.create_task(turn(http, first.up.url, prompt(7, 1), 100_000))
            await WallClock().sleep(0.1)
            os.kill(first._process.pid, signal.SIGKILL)  # in the middle of an answer
            with pytest.raises((aiohttp.ClientError, AssertionError)):
                await streaming

            second = await StackProcess.start(of, attach=True)
            url = second.up.url
            assert {w.generation for w in second.up.workers} == {w.ready.info.generation for w in workers}
            for number in range(6):
                usage = await turn(http, url, prompt(number, 3))
                assert usage["prompt_tokens_details"]["cached_tokens"] == 96, "on the worker that holds it"
            cached = await metric(http, url, "bien_cached_tokens")
            assert cached == 6 * 96
            assert await metric(http, url, "bien_router_predicted_cached_tokens") == cached, "parity is 1"
            assert await metric(http, url, "bien_index_restores") == 2, "both caches came from Redis"
            assert await metric(http, url, "bien_index_asked") == 0, "no worker was asked for its own"
            async with http.get(f"{url}/health") as answer:
                assert (await answer.json())["index"]["state"] == "ok"
    finally:
        for stack in (first, second):
            if stack is not None:
                await stack.stop()
        await asyncio.gather(*(worker.stop() for worker in workers))
    with server.client as client:
        assert list(client.keys("bien:{*}:worker:*")) == [], "leases are taken back at a clean end"
        assert [k for k in client.keys("*") if client.ttl(k) < 0] == [], "all else expires"
