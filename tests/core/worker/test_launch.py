"""Real worker processes with the fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from bien.core.deployment import ModelSpec
from bien.core.errors import BienError, ModelError, PluginError, ResourceError
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.launch import WorkerProcess, launch
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.start import WorkerStart
from tests.core.worker.client_contract import Recorder

ROOT = Path(__file__).parents[3]
ENV = {"PYTHONPATH": str(ROOT)}
BUILDER = "tests.core.worker.fake_engine:build"


def start(id: str = "w0", model: str = "fake", **more: object) -> WorkerStart:
    return WorkerStart(id, ModelSpec(model), token="secret", builder=BUILDER, **more)  # type: ignore[arg-type]


async def connect(worker: WorkerProcess) -> tuple[SocketClient, Recorder]:
    client = await SocketClient.connect(worker.ready.host, worker.ready.port, worker.start.token)
    recorder = Recorder()
    client.attach(recorder)
    return client, recorder


def request(tokens: int = 5, prompt: int = 10, session: str = "") -> GenerateRequest:
    ids = TokenIds.of(range(prompt))
    return GenerateRequest("r", ids, SamplingParams(max_tokens=tokens), tenant="checked", session=session)


async def test_two_workers_serve_die_and_come_back() -> None:
    said: list[tuple[str, str]] = []
    workers = await launch([start("w0"), start("w1")], lambda *what: said.append(what), env=ENV)
    try:
        assert sorted(said) == [("w0", "making a fake engine"), ("w1", "making a fake engine")]
        assert [w.ready.info.id for w in workers] == ["w0", "w1"]
        (one, first), (two, second) = [await connect(w) for w in workers]
        one.submit(1, request(3, prompt=200_000))
        two.submit(1, request(3))
        await first.finished(1)
        await second.finished(1)
        assert (first.finish(1), second.finish(1)) == ("length", "length")

        one.submit(2, request(100_000, session="slow"))
        await first.until(lambda: 2 in first.outputs)
        os.kill(workers[0].pid, signal.SIGKILL)
        await first.until(lambda: first.deaths)
        assert "was lost" in first.deaths[0]
        assert "was killed by signal 9 (SIGKILL)" in await workers[0].wait()
        assert not workers[0].stopped
        assert not second.deaths

        workers.append(await workers[0].respawn())
        again, third = await connect(workers[-1])
        assert again.info.id == "w0"
        assert again.info.generation != one.info.generation
        assert again.info.generation.endswith("-1"), "the epoch grew"
        again.submit(1, request())
        await third.finished(1)

        await workers[1].stop()
        await second.until(lambda: second.deaths)
        assert second.deaths == ["stopped"]
        assert workers[1].stopped
        assert "ended with 0" in await workers[1].wait()
        os.kill(workers[-1].pid, signal.SIGINT)
        again.submit(2, request())
        await third.finished(2)
        await again.close()
    finally:
        for worker in workers:
            await worker.stop()


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("missing", ModelError, "model folder 'missing' lacks config.json"),
        ("crash", BienError, r"was killed by signal 6 \(SIGABRT\).* while it started"),
        ("bug", BienError, "worker 'w1' failed: ZeroDivisionError: a bug"),
    ],
)
async def test_a_failing_start_is_raised_as_it_was_and_nothing_stays(
    model: str, error: type[BienError], says: str
) -> None:
    before = children()
    with pytest.raises(error, match=says) as caught:
        await launch([start("w0"), start("w1", model)], env=ENV)
    assert type(caught.value) is error
    if isinstance(caught.value, ModelError):
        assert caught.value.field == "model.name"
    assert children() == before


async def test_a_port_in_use_is_named() -> None:
    listening = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    with pytest.raises(ResourceError, match=f"cannot listen on 127.0.0.1:{port}"):
        await launch([start(port=port)], env=ENV)
    listening.close()


async def test_an_unknown_builder_is_named() -> None:
    bad = WorkerStart("w0", builder="bien.core.nowhere:build")
    with pytest.raises(PluginError, match="'bien.core.nowhere:build' cannot be loaded"):
        await launch([bad])


async def test_a_start_that_takes_too_long_is_ended() -> None:
    before = children()
    with pytest.raises(ResourceError, match="workers w0 were not ready within 0.2 seconds"):
        await launch([start(model="hang")], env=ENV, timeout=0.2)
    assert children() == before


async def test_cancelling_a_launch_leaves_nothing_running() -> None:
    before = children()
    task = asyncio.create_task(launch([start(model="hang")], env=ENV))
    while children() == before:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == before


PARENT = f"""
import asyncio
from bien.core.deployment import ModelSpec
from bien.core.worker.launch import launch
from bien.core.worker.start import WorkerStart

async def main():
    one = WorkerStart("w0", ModelSpec("fake"), builder={BUILDER!r}, die_with_parent=False)
    two = WorkerStart("w1", ModelSpec("fake"), builder={BUILDER!r})
    workers = await launch([one, two])
    print(*(w.pid for w in workers), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_worker_outlives_its_parent() -> None:
    """Worker 0 has the end of its stdin only, worker 1 the kernel's signal too."""
    env = os.environ | ENV
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while (left := [p for p in workers if running(p)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in left:
        process.kill()
    assert not left


def running(process: psutil.Process) -> bool:
    """Whether it lives; one that nobody has reaped yet does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if running(p)}
