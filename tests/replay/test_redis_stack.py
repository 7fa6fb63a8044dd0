"""Stacks whose index lies in Redis: real gateway and worker processes, a real server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from typer.testing import CliRunner

from bien.core.clock import WallClock
from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.errors import BienError, DeploymentError, ResourceError
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.core.worker.launch import WorkerProcess, launch
from bien.gateway.testing.durable import until
from bien.replay.cli import make_app
from bien.replay.display import Display
from bien.replay.fleet import lasting_starts
from bien.replay.live import Plan, replay
from bien.replay.options import ReplayOptions
from bien.replay.result import Result
from bien.replay.simulation import simulated
from bien.replay.stack import Stack, open_index
from bien.replay.stack_process import StackProcess
from bien.traces.model import TraceMeta
from bien.traces.native import write_native
from tests.redis_process import RedisProcess, redis_process, require_redis
from tests.redis_servers import replicated
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


async def state(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/health") as answer:
        assert answer.status == 200
        return str((await answer.json())["index"]["state"])


async def becomes(session: aiohttp.ClientSession, url: str, wanted: str) -> None:
    async with asyncio.timeout(30):
        while await state(session, url) != wanted:
            await WallClock().sleep(0.05)


async def test_serving_goes_on_while_redis_is_away(model: Path, server: RedisProcess) -> None:
    """Frozen, gone, back and empty: no request fails, no cached token is missed, and it is said."""
    stack = await StackProcess.start(deployment(model, server.url, count=2, timeout_seconds=0.2))
    try:
        async with aiohttp.ClientSession() as http:
            url, cached = stack.up.url, 0

            async def turns(n: int) -> None:
                nonlocal cached
                for number in range(4):
                    usage = await turn(http, url, prompt(number, n))
                    assert usage["prompt_tokens_details"]["cached_tokens"] == 48 * (n - 1)
                    cached += 48 * (n - 1)

            await turns(1)
            await becomes(http, url, "ok")
            assert await metric(http, url, "bien_index_store_up") == 1
            server.freeze()
            await turns(2)
            await becomes(http, url, "away")
            await turns(3)
            assert await metric(http, url, "bien_index_store_up") == 0
            assert await metric(http, url, "bien_index_store_errors") > 0
            server.thaw()
            server.stop()
            await turns(4)
            server.start()
            await becomes(http, url, "ok")
            with server.client as client:
                assert len(client.keys("bien:{*}:worker:*")) == 2, "the leases are published anew"
            await turns(5)
            assert await metric(http, url, "bien_cached_tokens") == cached
            assert await metric(http, url, "bien_router_predicted_cached_tokens") == cached
            assert await metric(http, url, "bien_index_store_up") == 1
    finally:
        await stack.stop()


@pytest.mark.slow
async def test_a_minute_without_redis(model: Path, server: RedisProcess) -> None:
    """Two gateways, requests all the while: none fails, and what is predicted is found."""
    of = deployment(model, server.url, count=2, timeout_seconds=0.5)
    workers = await fleet(of, model)
    stacks: list[StackProcess] = []
    try:
        for _ in range(2):
            stacks.append(await StackProcess.start(of, attach=True))
        async with aiohttp.ClientSession() as http:
            urls = [stack.up.url for stack in stacks]

            count = 0

            async def go_on(seconds: float) -> None:
                nonlocal count
                end = WallClock().time() + seconds
                while WallClock().time() < end:
                    session, n = divmod(count, 12)
                    await turn(http, urls[count % 2], prompt(session, n + 1))
                    count += 1
                    await WallClock().sleep(0.02)

            await go_on(1)
            server.freeze()
            await go_on(30)
            server.stop()
            await go_on(30)
            server.start()
            for url in urls:
                await becomes(http, url, "ok")
                cached = await metric(http, url, "bien_cached_tokens")
                predicted = await metric(http, url, "bien_router_predicted_cached_tokens")
                assert cached > 0 and abs(predicted - cached) <= 0.05 * cached
    finally:
        for stack in stacks:
            await stack.stop()
        await asyncio.gather(*(worker.stop() for worker in workers))


@pytest.mark.slow
async def test_traffic_goes_through_a_failover(model: Path) -> None:
    """Two gateways, two workers, sessions all the while, and the primary is killed: none fails, and once
    the replica has taken over all is as it was; a gateway that starts then knows what workers hold."""
    with replicated() as servers:
        of = deployment(model, servers.url, count=2, timeout_seconds=0.5)
        workers = await fleet(of, model)
        stacks: list[StackProcess] = []
        try:
            for _ in range(2):
                stacks.append(await StackProcess.start(of, attach=True))
            async with aiohttp.ClientSession() as http:
                urls = [stack.up.url for stack in stacks]
                over, turns = asyncio.Event(), 0

                async def sessions(first: int) -> None:
                    nonlocal turns
                    session = first
                    while not over.is_set():
                        for n in range(12):
                            usage = await turn(http, urls[(session + n) % 2], prompt(session, n + 1))
                            assert usage["completion_tokens"] == 4
                            turns += 1
                            await WallClock().sleep(0.02)
                        session += 6

                async def both(name: str) -> float:
                    return sum([await metric(http, url, name) for url in urls])

                async with asyncio.TaskGroup() as group:  # a turn that fails ends all
                    for first in range(6):
                        group.create_task(sessions(first))
                    for url in urls:
                        await becomes(http, url, "ok")
                    await until(lambda: turns > 60)
                    servers.primary.stop()
                    for url in urls:
                        await becomes(http, url, "away")
                    before = turns
                    await until(servers.promoted)
                    for url in urls:
                        await becomes(http, url, "ok")
                    assert turns > before, "nobody waited for it"
                    names = "bien_cached_tokens", "bien_router_predicted_cached_tokens"
                    cached, predicted = [await both(name) for name in names]
                    later = turns + 60
                    await until(lambda: turns > later)
                    over.set()
                cached, predicted = [
                    await both(name) - was for name, was in zip(names, (cached, predicted), strict=True)
                ]
                assert cached > 0 and abs(predicted - cached) <= 0.01 * cached
                assert await both("bien_replaced") == 0, "no worker was thought to be dead"

                usage = await turn(http, urls[0], prompt(1000, 2))
                stacks.append(await StackProcess.start(of, attach=True))
                usage = await turn(http, stacks[2].up.url, prompt(1000, 3))
                assert usage["prompt_tokens_details"]["cached_tokens"] == 96
                assert await metric(http, stacks[2].up.url, "bien_index_restores") == 2
        finally:
            for stack in stacks:
                await stack.stop()
            await asyncio.gather(*(worker.stop() for worker in workers))


async def test_a_killed_worker_comes_back_with_a_lease_and_nothing_of_its_former_life(
    model: Path, server: RedisProcess
) -> None:
    stack = await StackProcess.start(deployment(model, server.url))
    try:
        async with aiohttp.ClientSession() as http:
            url, former = stack.up.url, stack.up.workers[0]
            for n in (1, 2):
                await turn(http, url, prompt(0, n))
            os.kill(former.pid, signal.SIGKILL)
            assert (await turn(http, url, prompt(0, 3)))["prompt_tokens_details"]["cached_tokens"] == 0
            assert (await turn(http, url, prompt(0, 4)))["prompt_tokens_details"]["cached_tokens"] == 144
            await becomes(http, url, "ok")
            cached = await metric(http, url, "bien_cached_tokens")
            assert cached == await metric(http, url, "bien_router_predicted_cached_tokens") == 48 + 144
            with server.client as client:
                (lease,) = client.keys("bien:{*}:worker:main-0")
                assert client.hget(lease, "generation").decode() != former.generation
                assert client.hget(lease, "tiers") == b"device" and int(client.hget(lease, "capacity")) > 0
    finally:
        await stack.stop()


@pytest.mark.slow
@pytest.mark.parametrize("silence", [1.0, 0.0])
async def test_a_worker_that_hangs_is_no_target_until_it_answers(
    model: Path, server: RedisProcess, silence: float
) -> None:
    """Given up for its silence; or, where that is waited for without end, not asked for more than it has."""
    of = deployment(model, server.url, count=2)
    of = msgspec.structs.replace(
        of, gateway=msgspec.structs.replace(of.gateway, silence_seconds=silence, verify="off")
    )
    stack = await Stack.start(of)
    stopped = 0
    try:
        before = {w.generation for w in stack.workers}
        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(turn(http, stack.url, prompt(n, 1)) for n in range(6)))
            stopped = stack.workers[0].pid
            os.kill(stopped, signal.SIGSTOP)
            if not silence:
                await until(lambda: len(stack.workers) == 1)
            await asyncio.gather(*(turn(http, stack.url, prompt(n, 2)) for n in range(6, 12)))
            assert stack.gateway.totals.deaths == (1 if silence else 0)
            assert bool(stack.gateway.totals.replaced) == bool(silence)
            os.kill(stopped, signal.SIGCONT)
            await until(lambda: len(stack.workers) == 2)
            assert {w.generation for w in stack.workers} == before, "it was not started again"
            await asyncio.gather(*(turn(http, stack.url, prompt(n, 3)) for n in range(6, 12)))
    finally:
        if stopped:
            os.kill(stopped, signal.SIGCONT)
        await stack.close()


def toml(path: Path, model: Path, secret: str = "shared") -> Path:
    path.write_text(
        f"""
        [model]
        name = "{model}"
        block_tokens = {BLOCK}
        [gateway]
        port = 0
        secret = "{secret}"
        drain_seconds = 0
        [[pool]]
        count = 1
        kv_tokens = 4096
        slots = 4
        threads = 1
        executor = "simulated"
        """
    )
    return path


async def command(*words: str) -> tuple[asyncio.subprocess.Process, str]:
    """A command of bien that runs until it is told to end, and its first line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "bien.replay.cli", *words), stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    said = (await process.stdout.readline()).decode()
    return process, said or (await process.stderr.read()).decode()


@pytest.mark.slow
async def test_workers_and_gateway_as_commands(model: Path, server: RedisProcess, tmp_path: Path) -> None:
    file = toml(tmp_path / "d.toml", model)
    worker, said = await command("worker", str(file), "--redis", server.url)
    gateways = []
    try:
        assert "workers main-0 at 127.0.0.1:" in said, said
        async with aiohttp.ClientSession() as http:
            for n, number in ((1, signal.SIGKILL), (2, signal.SIGTERM)):
                gateway, said = await command("serve", str(file), "--redis", server.url, "--attach")
                gateways.append(gateway)
                url = re.search(r"at (http://\S+)/v1 with 1 worker", said)
                assert url is not None, said
                usage = await turn(http, url[1], prompt(0, n))
                assert usage["prompt_tokens_details"]["cached_tokens"] == 48 * (n - 1)
                gateway.send_signal(number)
                await gateway.wait()
        assert worker.returncode is None, "it outlives its gateways"
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
        with server.client as client:
            assert client.keys("bien:{*}:worker:*") == []
    finally:
        for process in (worker, *gateways):
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_what_cannot_meet_says_why(model: Path, server: RedisProcess) -> None:
    of = deployment(model, server.url)
    secretless = msgspec.structs.replace(of, gateway=msgspec.structs.replace(of.gateway, secret=""))
    with pytest.raises(DeploymentError, match="gateway.secret is empty"):
        await Stack.start(secretless, attach=True)
    memory = msgspec.structs.replace(of.gateway, kv_index=Selection("memory"))
    with pytest.raises(DeploymentError, match="meet in Redis, and the index is 'memory'"):
        await Stack.start(msgspec.structs.replace(of, gateway=memory), attach=True)


def test_options_that_cannot_be_say_why(model: Path, tmp_path: Path) -> None:
    """Before anything is loaded or asked."""
    url = "redis://127.0.0.1:1"
    file = str(toml(tmp_path / "d.toml", model))
    for words, why in (
        (("worker", file), "the index is 'memory'"),
        (("worker", file, "--host", "0.0.0.0"), "one address of this machine"),
        (("worker", file, "--host", "192.0.2.1", "--redis", url), "no address of this machine"),
        (("worker", file, "--redis", "embedded"), "belongs to one stack"),
        (("serve", file, "--redis", "embedded", "--attach"), "belongs to one stack"),
        (("serve", file, "--redis", "redis://u:hidden@h:x"), r"--redis: 'redis://\*\*\*@h:x' is no URL"),
        (("serve", file, "--redis", "redis://u:hidden@127.0.0.1:1"), r"\*\*\*@127.0.0.1:1: .*connect"),
        (("replay", "--url", "http://127.0.0.1:1", "--redis", "embedded"), "leave it out with --url"),
    ):
        done = CliRunner().invoke(make_app(), words)
        assert isinstance(done.exception, BienError), done.output
        assert re.search(why, str(done.exception)) and "hidden" not in str(done.exception)


def test_a_deployment_is_described_without_credentials(model: Path, tmp_path: Path) -> None:
    file = toml(tmp_path / "d.toml", model)
    with file.open("a") as more:
        more.write('[gateway.kv_index]\nuse = "redis"\nurl = "redis://me:hidden@host:6379/0"\n')
    done = CliRunner().invoke(make_app(), ["deployment", "check", str(file)])
    assert "kv_index: redis (url='redis://***@host:6379/0'" in done.output and "hidden" not in done.output


async def test_a_simulation_needs_no_redis(model: Path, tmp_path: Path) -> None:
    of, notes = simulated(deployment(model, "redis://127.0.0.1:1/0"))
    assert of.gateway.kv_index == Selection("memory")
    assert any("'redis'" in note for note in notes)


@pytest.mark.slow
async def test_a_replay_of_a_real_model_through_a_gateway_that_is_killed(
    tmp_path: Path, server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch workers outlive the gateway; sessions that were begun before go on after it, and what the new
    gateway predicts is what the workers find."""
    monkeypatch.setattr("bien.replay.targets.http.FOREIGN_VOCABULARY", 280)
    write_toy(tmp_path / "toy")
    of = deployment(tmp_path / "toy", server.url, count=2)
    pool = msgspec.structs.replace(of.pool[0], executor=Selection("torch"), kv_tokens=16384)
    of = msgspec.structs.replace(of, pool=(pool,))
    workers = await fleet(of, tmp_path / "toy")
    first = second = None
    try:
        first = await StackProcess.start(of, attach=True)
        begun = [session(f"s{i}", (0, 200, 16), (0.01, 60, 16)) for i in range(8)]
        whole = [session(f"s{i}", (0, 200, 16), (0.01, 60, 16), (0.01, 60, 16)) for i in range(8)]
        write_native(tmp_path / "begun.jsonl", TraceMeta("native", 16), begun)
        write_native(tmp_path / "whole.jsonl", TraceMeta("native", 16), whole)
        one = await measured(tmp_path / "begun.jsonl", first.up.url, tmp_path / "one.json")
        assert one.turns.errors == 0
        os.kill(first._process.pid, signal.SIGKILL)
        second = await StackProcess.start(of, attach=True)
        # One at a time: with others ahead of it, a turn may rightly be computed anew elsewhere.
        two = await measured(tmp_path / "whole.jsonl", second.up.url, tmp_path / "two.json", 1)
        assert two.turns.count == 24 and two.turns.errors == 0
        async with aiohttp.ClientSession() as http:
            cached = await metric(http, second.up.url, "bien_cached_tokens")
            assert cached == two.tokens.cached_input
            assert await metric(http, second.up.url, "bien_router_predicted_cached_tokens") == cached
        # All but the last block of what had been computed before the kill is found again, in each turn.
        assert two.tokens.cached_input > 0.9 * (two.tokens.logical_input - 8 * 76)
        assert two.tokens.cached_input > one.tokens.cached_input
    finally:
        for stack in (first, second):
            if stack is not None:
                await stack.stop()
        await asyncio.gather(*(worker.stop() for worker in workers))


async def measured(trace: Path, url: str, into: Path, concurrency: int = 4) -> Result:
    with Display(WallClock()) as display:
        result, _ = await replay(Plan((trace,), ReplayOptions(concurrency), into, None, url), display)
    return result
