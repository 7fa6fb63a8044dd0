"""A real deployment of one tiny model: gateway process, worker process, replay through both."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bien.core.clock import WallClock
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.core.errors import BienError, DeploymentError, ModelError, ResourceError
from bien.core.testing.toy import write_toy
from bien.replay.display import Display
from bien.replay.live import Plan, replay
from bien.replay.options import ReplayOptions
from bien.replay.result import Result, read_result
from bien.replay.stack_process import StackProcess
from bien.traces.model import TraceMeta
from bien.traces.native import write_native
from tests.replay.fakes import session


def deployment(model: Path | str, *, port: int = 0, **pool: object) -> Deployment:
    return Deployment(
        ModelSpec(str(model), block_tokens=16),
        GatewaySpec(port=port),
        (PoolSpec(kv_tokens=4096, slots=4, threads=1, **pool),),  # type: ignore[arg-type]
    )


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def test_a_replay_through_real_processes(tmp_path: Path) -> None:
    before = children()
    write_toy(tmp_path / "toy")
    trace = tmp_path / "t.bien.jsonl"
    sessions = [session(f"s{i}", (0, 100, 8), (0.01, 30, 5)) for i in range(2)]
    write_native(trace, TraceMeta("native", 16), sessions)
    deployed = deployment(tmp_path / "toy", speculator=Selection("early-exit", {"layers": 1}))
    plan = Plan((trace,), ReplayOptions(concurrency=2), tmp_path / "r.json", deployed)
    with Display(WallClock()) as display:
        result, interrupted = asyncio.run(replay(plan, display))
    assert not interrupted and result.turns.count == 4 and result.turns.errors == 0
    assert result.tokens.output == 26 and result.card.length_mismatch == 0
    # 107 tokens of the first turns have KV afterwards: 6 blocks.
    assert result.tokens.cached_input == 2 * 96
    assert result.router.parity == 1.0
    assert result.cache.loss is not None and result.cache.loss.unknown == 0
    assert result.router.imbalance == 1.0
    assert result.speculation.acceptance_length is not None and result.speculation.acceptance_length >= 1
    assert read_result(tmp_path / "r.json").tokens == result.tokens
    assert children() == before


def start(of: Deployment) -> None:
    async def main() -> None:
        stack = await StackProcess.start(of)
        await stack.stop()

    asyncio.run(main())


def test_what_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(ModelError, match="no folder, no GGUF file and no built-in name"):
        start(deployment("smollm3"))
    with pytest.raises(DeploymentError, match=r"pool\[0\].scheduler.token_bugdet.*token_budget"):
        start(deployment(tmp_path, scheduler=Selection("fcfs", {"token_bugdet": 3})))
    assert children() == before


def test_workers_that_do_not_fit_into_memory_are_not_started(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    pool = PoolSpec(count=1000, kv_tokens=1 << 40)
    before = children()
    with pytest.raises(ResourceError, match=r"deployment needs .* are available; lower count(?s:.)* 1000 x "):
        start(Deployment(ModelSpec(str(tmp_path / "toy")), GatewaySpec(port=0), (pool,)))
    assert children() == before


def test_a_port_in_use_is_named_before_anything_is_loaded() -> None:
    before = children()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on 127.0.0.1 is in use"):
            start(deployment("no-such-model", port=port))  # which would be the next to be looked for
    assert children() == before


def test_cancelling_the_start_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    write_toy(tmp_path / "toy")

    async def main() -> None:
        seen = asyncio.Event()
        task = asyncio.create_task(StackProcess.start(deployment(tmp_path / "toy"), lambda *step: seen.set()))
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert children() == before


def joined(worker: psutil.Process) -> bool:
    """Whether a gateway is connected to it."""
    return any(c.status == psutil.CONN_ESTABLISHED for c in worker.net_connections())


def replay_while(tmp_path: Path, strike: Callable[[psutil.Process], None]) -> Result:
    """Replay against a toy; `strike` gets the gateway's process when it has its worker, before a turn."""
    write_toy(tmp_path / "toy")
    trace = tmp_path / "t.bien.jsonl"
    write_native(trace, TraceMeta("native", 16), [session("a", (3.0, 100, 8), (0.1, 30, 5))])
    plan = Plan((trace,), ReplayOptions(), tmp_path / "r.json", deployment(tmp_path / "toy"))
    before = children()

    async def main() -> Result:
        with Display(WallClock()) as display:
            task = asyncio.create_task(replay(plan, display))
            gateways: list[psutil.Process] = []
            while not gateways and not task.done():
                await asyncio.sleep(0.05)
                started = [p for p in psutil.Process().children() if p.pid not in before]
                gateways = [p for p in started if any(map(joined, p.children()))]
            strike(gateways[0])
            return (await task)[0]

    try:
        return asyncio.run(main())
    finally:
        assert children() == before


def test_a_gateway_that_dies_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BienError, match="the gateway process ended with -9"):
        replay_while(tmp_path, lambda gateway: gateway.kill())
    if (tmp_path / "r.json").exists():  # a turn was sent by then
        assert read_result(tmp_path / "r.json").validity.reasons[0].startswith("cut short: the gateway")


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    result = replay_while(tmp_path, lambda gateway: gateway.children()[0].kill())
    assert result.turns.count == 2 and result.turns.errors == 0
