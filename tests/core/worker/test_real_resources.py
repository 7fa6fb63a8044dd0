"""Threads and memory of real worker processes, against what was promised."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bien.core.compose import Composition, compose
from bien.core.cores import available_cores
from bien.core.deployment import parse_deployment
from bien.core.models.fetch import resolve_model
from bien.core.plugins import PluginManager
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.toy import write_toy
from bien.core.worker.launch import WorkerProcess, launch
from bien.core.worker.memory import plan_memory
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.start import assign
from tests.core.worker.client_contract import Recorder

TICK = os.sysconf("SC_CLK_TCK")
# A builder that says what the math libraries of its process go by.
PROBE = """
import json, os, pathlib, torch
from bien.core.build import build_worker

def build(start, progress):
    built = build_worker(start, progress)
    said = [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]]
    (pathlib.Path(__file__).parent / (start.id + ".json")).write_text(json.dumps(said))
    return built
"""


def composed(model: Path | str, **pool: Any) -> Composition:
    return compose(parse_deployment({"model": {"name": str(model)}, "pool": [pool]}), PluginManager.load(""))


def prompt(length: int, seed: int) -> TokenIds:
    return TokenIds.of((seed * 7919 + i * 31) % 200 + 3 for i in range(length))


async def work(worker: WorkerProcess, prompts: list[TokenIds], tokens: int) -> None:
    client = await SocketClient.connect(worker.ready.host, worker.ready.port, worker.start.token)
    recorder = Recorder()
    client.attach(recorder)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.8, top_p=0.9, ignore_eos=True)
    for rid, ids in enumerate(prompts):
        client.submit(rid, GenerateRequest("r", ids, sampling))
    while not all(recorder.finish(rid) for rid in range(len(prompts))):
        assert client.alive
        await asyncio.sleep(0.02)
    assert {recorder.finish(rid) for rid in range(len(prompts))} == {"length"}
    await client.close()


def ticks(pid: int) -> dict[str, int]:
    """CPU time of each thread of a process."""
    out = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        out[task.name] = int(fields[11]) + int(fields[12])
    return out


@pytest.mark.parametrize("threads", [[1, 1], [2]], ids=["two of one", "one of two"])
async def test_a_worker_computes_in_exactly_its_threads(threads: list[int], tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    toy = write_toy(tmp_path / "toy", hidden_size=384, intermediate_size=1536, num_hidden_layers=4)
    starts = assign(composed(toy, count=len(threads), kv_tokens=8192))
    if len(threads) == available_cores() == 2:
        assert [start.threads for start in starts] == threads, "the sum is the cores"
    starts = [
        msgspec.structs.replace(start, threads=n, builder="probe:build")
        for start, n in zip(starts, threads, strict=True)
    ]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    workers = await launch(starts, env={"PYTHONPATH": path})
    try:
        for worker, n in zip(workers, threads, strict=True):
            said = json.loads((tmp_path / f"{worker.start.id}.json").read_text())
            assert said == [n, str(n), "PASSIVE"]
            await work(worker, [prompt(300, 99)], 2)
            before = ticks(worker.pid)
            for seed in range(40):
                await work(worker, [prompt(1000, seed)], 1)
                now = ticks(worker.pid)
                spent = sorted((now[id] - before.get(id, 0) for id in now), reverse=True)
                if spent[0] >= TICK // 2:
                    break
            computing = [t for t in spent if t > spent[0] / 5]
            assert len(computing) == n, f"CPU time by thread, in ticks: {spent}"
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


def resident(pid: int, file: str) -> tuple[int, int]:
    """Bytes of a process in memory: of everything but `file`, and of `file`."""
    own = mapped = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            name = line.rpartition(" ")[2]
        elif key == "Rss:":
            size = int(rest.split()[0]) * 1024
            if name == file:
                mapped += size
            else:
                own += size
    return own, mapped


CASES = [
    {"quantizer": "none", "kv_tokens": 2048},
    {"quantizer": "none", "kv_tokens": 16384},
    {"quantizer": "int8", "kv_tokens": 2048},
    {"quantizer": "int8", "kv_tokens": 16384},
    {"quantizer": "int4", "kv_tokens": 2048},
    {"quantizer": "int8", "kv_memory": "500MiB", "slots": 4, "speculator": "early-exit"},
    {"quantizer": "none", "kv_tokens": 4096, "scheduler": {"use": "fcfs", "token_budget": 2048}},
]


@pytest.mark.slow
@pytest.mark.parametrize("pool", CASES, ids=lambda pool: " ".join(str(v) for v in pool.values()))
async def test_the_estimate_is_near_the_peak(pool: dict[str, Any], record_property: Any) -> None:
    """What counts is the largest resident size, without the pages of the checkpoint that loading left behind:
    of those only the embedding is read again, and another process may have paid for it."""
    folder = resolve_model("smollm2-135m")
    composition = composed(folder, threads=1, **pool)
    [estimate] = plan_memory(composition, composition.model).workers
    [worker] = await launch(assign(composition), env={"OMP_NUM_THREADS": "1"})
    try:
        held = estimate.pool.kv_tokens
        assert held is not None and worker.ready.info.capacity_tokens == held
        rows = min(estimate.pool.slots, 4)
        prompts = [prompt(min(1900, held // rows - 32), seed) for seed in range(rows)]
        working = asyncio.create_task(work(worker, prompts, 4))
        peak = 0
        for own in _sampled(worker.pid, str(folder / "model.safetensors")):
            peak = max(peak, own)
            done, _ = await asyncio.wait([working], timeout=0.05)
            if done:
                break
        await working
    finally:
        await worker.stop()
    table = 49152 * 576 * 4
    real = peak + table
    record_property("ratio", estimate.total / real)
    print(f"{pool}: estimated {estimate.total / 1e6:,.0f} MB, real {real / 1e6:,.0f} MB")
    assert 0.75 * real <= estimate.total <= 1.25 * real


def _sampled(pid: int, file: str) -> Iterator[int]:
    while True:
        yield resident(pid, file)[0]
