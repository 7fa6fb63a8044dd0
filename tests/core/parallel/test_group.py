"""Ranks that die, break and are slow to come; ranks as threads, then as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from bien.core.build import BuiltWorker, build
from bien.core.compose import PoolComposition, compose
from bien.core.deployment import Deployment, ModelSpec, PoolSpec, Selection
from bien.core.errors import ExecutorDiedError, PluginError, PluginFault, UserError
from bien.core.executors.group import GroupExecutor
from bien.core.executors.rank import RankLoop
from bien.core.plan import ExecutorPlan, i32
from bien.core.plugins import PluginManager
from bien.core.request import BlockRuns, GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import write_toy
from bien.core.worker.launch import launch
from bien.core.worker.rank_launch import LaunchedRanks
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.start import Ready, assign
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from tests.core.parallel.test_group_exactness import group_harness
from tests.core.test_exactness import play
from tests.core.worker.client_contract import Recorder

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SIMULATED = Selection("simulated", {"step_ms": 0.1, "token_ms": 0.0})
PROMPT = list(range(3, 60))
SECONDS = 20.0


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load("")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    changes = {"max_position_embeddings": 65536, "num_key_value_heads": 3}
    return str(write_toy(tmp_path_factory.mktemp("toy") / "llama", **changes))


def deployment(model: str, devices: int = 2, **spec: Any) -> Deployment:
    chosen = {"parallel": Selection("tensor"), "kv_tokens": 1024, "slots": 3, **spec}
    pool = PoolSpec(devices=devices, threads=devices, **chosen)
    return Deployment(ModelSpec(model, "float64", max_context=60000), pool=(pool,))


def composed(manager: PluginManager, model: str, devices: int = 2, **spec: Any) -> PoolComposition:
    return compose(deployment(model, devices, **spec), manager).pools[0]


def generate(worker: BuiltWorker, sampling: SamplingParams = GREEDY) -> list[int]:
    worker.engine.submit(GenerateRequest("r", TokenIds.of(PROMPT), sampling))
    packed = b""
    while worker.engine.busy:
        plan = worker.engine.begin()
        assert plan is not None
        result = worker.executor.sample(worker.executor.forward(plan)).result()
        packed += b"".join(o.tokens for o in worker.engine.finish(result).outputs)
    return list(TokenIds(packed).ids())


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks that a process has started, and that run."""
    found = psutil.Process(pid).children(recursive=True)
    return [p for p in found if "bien.core.worker.rank" in p.cmdline() and p.status() != "zombie"]


def gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == "zombie")
    except psutil.NoSuchProcess:
        return True


def talk(worker: BuiltWorker, folder: Path) -> list[list[int]]:
    """Conversations in small chunks, few blocks and overlapping plans; every turn's text."""
    fields = {"block_tokens": 16, "max_context": 256, "blocks": 13, "depth": 2}
    h = TorchHarness(folder, Fcfs(FcfsConfig(token_budget=11)), {}, executor=worker.executor, **fields)
    text = play(h, SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True, seed=3), together=True)
    assert h.engine.stats().preemptions > 0
    assert max(h.cached.values()) > 16
    return text


# -- threads


@pytest.fixture
def group(toy: str) -> Any:
    h = group_harness(Path(toy), 3)
    yield h
    h.executor.close()


def test_a_step_that_breaks_off_ends_the_group(group: Any) -> None:
    executor: GroupExecutor = group.executor
    heard: list[ExecutorDiedError] = []
    executor.watch(heard.append)
    group.submit("x", PROMPT, max_tokens=100)
    for _ in range(3):
        group.step()

    def breaks(*arguments: Any) -> Any:
        raise RuntimeError("out of something")

    # In the middle of a step: the others wait for it.
    executor.local.model.layers[1] = breaks
    with pytest.raises(ExecutorDiedError, match="the group of 3 ranks has ended: .*out of something"):
        group.step()
    assert [str(e) for e in heard] == [str(executor._death)]
    with pytest.raises(ExecutorDiedError, match="out of something"):
        executor.forward(ExecutorPlan(99, *[i32()] * 5))


def test_a_rank_that_breaks_ends_the_group(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers notice as well; the one that broke is named."""
    group.submit("x", PROMPT, max_tokens=100)
    for _ in range(3):
        group.step()
    right, calls = RankLoop._step, []

    def breaks(loop: Any, message: Any) -> None:
        if loop.executor.model.first == 192:  # rank 2 holds the last words
            calls.append(1)
            raise ValueError("a bad rank")
        right(loop, message)

    monkeypatch.setattr(RankLoop, "_step", breaks)
    with pytest.raises(
        ExecutorDiedError, match="ended: rank 2 is gone; its last words: ValueError: a bad rank"
    ):
        group.step()
    assert calls == [1]


def test_a_listener_that_comes_late_hears_of_a_death(group: Any) -> None:
    executor: GroupExecutor = group.executor
    executor._remotes[1].steps.close()
    until(lambda: executor._death)
    heard: list[str] = []
    executor.watch(lambda error: heard.append(str(error)))
    assert heard == ["the group of 3 ranks has ended: rank 2 is gone"]


def test_opaque_prompts_fail_their_step_and_nothing_else(group: Any) -> None:
    group.submit("x", PROMPT, max_tokens=5)
    plan = group.engine.begin()
    plan.new[0].tokens = BlockRuns.of([(0, len(PROMPT))])
    with pytest.raises(PluginFault, match="needs token ids"):
        group.executor.forward(plan)
    group.engine.fail(plan.step, PluginFault("opaque"))
    group.submit("y", PROMPT, max_tokens=5)
    group.run()
    assert len(group.tokens["y"]) == 5


def test_a_step_that_is_not_sampled_is_forgotten_by_all(group: Any) -> None:
    """Sampling fails on rank 0 alone: its sequences end, the next ones are right on every rank."""
    for id in ("x", "w"):  # the last step that was sampled has two rows, the one that is not has one
        group.submit(id, PROMPT, max_tokens=5)
    group.run()
    group.submit("y", PROMPT[::-1], max_tokens=5)
    plan = group.engine.begin()
    group.executor.forward(plan)
    group.engine.fail(plan.step, RuntimeError("sampling failed"))
    group.submit("z", PROMPT, max_tokens=5)
    group.run()
    assert group.tokens["z"] == group.tokens["x"]


# -- processes


def test_ranks_are_processes_that_end_with_their_group(manager: PluginManager, toy: str) -> None:
    single = build(composed(manager, toy, 1, parallel=Selection("single")), id="w", generation="g")
    worker = build(composed(manager, toy), id="w", generation="g", threads=2)
    try:
        assert generate(worker) == generate(single)
        assert worker.info.fp == single.info.fp, "one can use the blocks of the other"
        found, want = (talk(w, Path(toy)) for w in (worker, single))
        assert found == want
        [rank] = ranks_of(os.getpid())
        environment = rank.environ()
        assert environment["OMP_NUM_THREADS"] == "1", "two threads for two ranks"
        died = threading.Event()
        heard: list[ExecutorDiedError] = []

        def watch(error: ExecutorDiedError) -> None:
            heard.append(error)
            died.set()

        worker.executor.watch(watch)  # type: ignore[attr-defined]
        rank.kill()
        assert died.wait(SECONDS), "nobody computes, and it must be noticed"
        assert f"rank 1 (pid {rank.pid}) was killed by signal 9 (SIGKILL)" in str(heard[0])
    finally:
        worker.close()
        single.close()
    assert not ranks_of(os.getpid())


def test_what_a_rank_fails_with_is_raised_here(manager: PluginManager, toy: str) -> None:
    pool = composed(manager, toy)
    old = msgspec.structs.replace(pool.plugins[0], version="0.0.0.1")
    [remote] = LaunchedRanks(pool.model, pool.spec, (old, *pool.plugins[1:])).open(2, 1)
    with pytest.raises(PluginError, match=r"composed with 0\.0\.0\.1"):
        remote.answer()
    remote.ended.wait(SECONDS)
    assert (
        remote.obituary()
        == f"rank 1 (pid {remote.pid}) ended with 2; its last words: {remote._failure.message}"
    )
    remote.kill()


@pytest.mark.parametrize("link", ["steps", "blocks"])
def test_a_rank_ends_with_its_links(
    manager: PluginManager, toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """As when rank 0 is killed, while this one waits for it: a thread of the rank follows each link. Rank 0
    could not take back the folder in which they were to meet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = composed(manager, toy)
    ranks = LaunchedRanks(pool.model, pool.spec, pool.plugins)
    [remote] = ranks.open(2, 1)
    assert remote.process is not None
    remote.answer()
    assert list(tmp_path.iterdir())
    getattr(remote, link).close()
    assert remote.process.wait(SECONDS) == 1
    assert not list(tmp_path.iterdir())
    remote.kill()


def test_sizes_that_fit_no_head_are_refused_before_anything_starts(manager: PluginManager, toy: str) -> None:
    with pytest.raises(UserError, match="valid: devices = 1, 2, 3, 6"):
        build(composed(manager, toy, 5), id="w", generation="g")
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used"):
        build(composed(manager, toy, device="cuda:99"), id="w", generation="g")
    with pytest.raises(UserError, match="device 'meta' cannot be used: it holds no data"):
        build(composed(manager, toy, 1, device="meta"), id="w", generation="g")
    with pytest.raises(UserError, match="runs on 1 device, not on 2"):
        build(composed(manager, toy, 2, parallel=Selection("single")), id="w", generation="g")


def test_a_simulated_group_starts_nothing(
    manager: PluginManager, toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchedRanks, "open", lambda *a: pytest.fail("a process"))
    worker = build(composed(manager, toy, executor=SIMULATED), id="w", generation="g")
    assert len(generate(worker)) == 20
    assert not ranks_of(os.getpid())
    worker.close()


@pytest.mark.slow
async def test_a_worker_ends_with_a_rank_and_a_rank_with_its_worker(manager: PluginManager, toy: str) -> None:
    starts = assign(compose(deployment(toy), manager))
    [worker] = await launch(starts)
    workers = [worker]
    try:
        client = await SocketClient.connect(worker.ready.host, worker.ready.port, worker.start.token)
        recorder = Recorder()
        client.attach(recorder)
        client.submit(1, GenerateRequest("r", TokenIds.of(PROMPT), SamplingParams(900, ignore_eos=True)))
        await recorder.until(lambda: 1 in recorder.outputs)
        [rank] = ranks_of(worker.pid)
        rank.kill()  # in the middle of a step, or between two
        await recorder.until(lambda: recorder.deaths)
        assert f"the group of 2 ranks has ended: rank 1 (pid {rank.pid}) was killed" in recorder.deaths[0]
        words = await worker.wait()
        assert "ended with 1" in words
        assert "rank 1" in words
        await client.close()

        workers.append(await worker.respawn())
        [rank] = ranks_of(workers[-1].pid)
        os.kill(workers[-1].pid, signal.SIGKILL)
        await workers[-1].wait()
        async with asyncio.timeout(SECONDS):
            while not gone(rank):
                await asyncio.sleep(0.05)
    finally:
        for w in workers:
            await w.stop()


@pytest.mark.slow
def test_torchrun(manager: PluginManager, toy: str, tmp_path: Path) -> None:
    file, token = tmp_path / "deployment.toml", tmp_path / "token"
    file.write_text(
        f'[model]\nname = "{toy}"\ndtype = "float64"\nmax_context = 200\n'
        '[[pool]]\ndevices = 2\nparallel = "tensor"\nkv_tokens = 1024\nslots = 3\n'
    )
    token.write_text("secret\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    entry = ["-m", "bien.core.worker.torchrun", str(file), "--token-file", str(token)]
    single = build(composed(manager, toy, 1, parallel=Selection("single")), id="w", generation="g")
    environment = {**os.environ, "BIEN_PLUGINS": ""}
    run = subprocess.Popen([*command, "2", *entry], stdout=subprocess.PIPE, env=environment)
    try:
        assert run.stdout is not None
        ready = msgspec.json.decode(run.stdout.readline(), type=Ready)
        assert said(ready) == generate(single)
        ranks = [p for p in psutil.Process(run.pid).children() if "bien.core.worker.torchrun" in p.cmdline()]
        other = next(p for p in ranks if p.pid != ready.info.pid)
        other.kill()
        run.wait(SECONDS)
        assert run.returncode == 1
        until(lambda: all(gone(p) for p in ranks))
    finally:
        run.kill()
        single.close()
    wrong = subprocess.run([*command, "1", *entry], capture_output=True, text=True, env=environment)
    assert "devices = 2 and torchrun started 1 ranks" in wrong.stderr


def said(ready: Ready) -> list[int]:
    async def ask() -> list[int]:
        client = await SocketClient.connect(ready.host, ready.port, "secret")
        recorder = Recorder()
        client.attach(recorder)
        client.submit(1, GenerateRequest("r", TokenIds.of(PROMPT), GREEDY))
        await recorder.finished(1)
        await client.close()
        return list(TokenIds(b"".join(o.tokens for o in recorder.outputs[1])).ids())

    return asyncio.run(ask())
