"""From selections to a worker: built in this process, then in worker processes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bien.core.build import BuiltWorker, build, fingerprint
from bien.core.compose import PoolComposition, compose
from bien.core.cores import available_cores
from bien.core.deployment import Deployment, HostSpec, ModelSpec, PoolSpec, Selection
from bien.core.errors import BienError, DeploymentError, ModelError, PluginError, ResourceError, UserError
from bien.core.kv.groups import KVGroup, boundary_group
from bien.core.plan import StepResult
from bien.core.plugins import PluginManager
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.speculation.options import SpeculationSpec
from bien.core.testing.toy import write_toy
from bien.core.worker.launch import launch
from bien.core.worker.socket_client import SocketClient
from bien.core.worker.start import WorkerStart, assign
from tests.core.worker.client_contract import Recorder

SIMULATED = Selection("simulated", {"step_ms": 0.1, "token_ms": 0.0})


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load("")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_toy(tmp_path_factory.mktemp("toy") / "llama"))


def composed(manager: PluginManager, model: str, max_context: int = 256, **spec: object) -> PoolComposition:
    pool = PoolSpec(**{"kv_tokens": 512, "slots": 3, **spec})  # type: ignore[arg-type]
    return compose(Deployment(ModelSpec(model, max_context=max_context), pool=(pool,)), manager).pools[0]


@pytest.fixture
def built(manager: PluginManager, toy: str) -> Iterator[BuiltWorker]:
    worker = build(composed(manager, toy), id="w0", generation="g", rng=random.Random(0))
    yield worker
    worker.close()


def generate(worker: BuiltWorker, prompt: list[int], tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    worker.engine.submit(GenerateRequest("r", TokenIds.of(prompt), sampling))
    packed = b""
    while worker.engine.busy:
        plan = worker.engine.begin()
        assert plan is not None
        result: StepResult = worker.executor.sample(worker.executor.forward(plan)).result()
        packed += b"".join(o.tokens for o in worker.engine.finish(result).outputs)
    worker.engine.check_integrity()
    return list(TokenIds(packed).ids())


def test_info_says_what_was_built(built: BuiltWorker, toy: str) -> None:
    info = built.info
    assert (info.id, info.generation, info.model, info.role) == ("w0", "g", toy, "both")
    assert (info.slots, info.max_context, info.block_tokens, info.capacity_tokens) == (3, 256, 16, 512)
    assert (info.vocab_size, info.eos_token_ids, info.group_kinds) == (288, (2,), ("full",))


def test_memory_becomes_tokens(manager: PluginManager, toy: str) -> None:
    """1 MiB: blocks of 6,144 bytes (3 layers of K and V of 2 heads of 8 floats), the null block among them;
    the drafter's one layer takes a third more."""
    pool = composed(manager, toy, kv_tokens=None, kv_memory=1 << 20)
    said: list[str] = []
    worker = build(pool, id="w0", generation="g", progress=said.append)
    assert worker.info.capacity_tokens == ((1 << 20) // 6144 - 1) * 16 == 2704
    assert "allocating KV for 2704 tokens" in said
    worker.close()
    pool = composed(
        manager, toy, kv_tokens=None, kv_memory=1 << 20, speculator=Selection("early-exit", {"layers": 1})
    )
    worker = build(pool, id="w0", generation="g")
    assert worker.info.capacity_tokens == ((1 << 20) // 8192 - 1) * 16
    worker.close()


def test_it_generates_and_caches(built: BuiltWorker) -> None:
    prompt = list(range(3, 60))
    first = generate(built, prompt, 12)
    assert len(first) == 12
    assert generate(built, prompt, 12) == first
    assert built.engine.stats().cached_tokens == 48, "the second time, three full blocks were found"


@pytest.mark.parametrize(
    "spec",
    [
        {"speculator": Selection("early-exit", {"layers": 2})},
        {"speculator": Selection("prompt-lookup")},
        {"kv_store": Selection("host")},
    ],
    ids=["device drafter", "host drafter", "store"],
)
def test_every_part_finds_its_place(
    manager: PluginManager, toy: str, built: BuiltWorker, spec: dict[str, Selection]
) -> None:
    """Greedy text does not depend on drafters and stores."""
    prompt = [5, 6, 7, 8] * 10
    other = build(composed(manager, toy, **spec), id="w1", generation="g")  # type: ignore[arg-type]
    try:
        assert generate(other, prompt, 20) == generate(built, prompt, 20)
        stats = other.engine.stats()
        assert (stats.drafted > 0) is ("speculator" in spec)
        assert ("draft" in other.info.group_kinds) is (spec.get("speculator", SIMULATED).use == "early-exit")
    finally:
        other.close()


@pytest.mark.parametrize("use", ["prompt-lookup", "early-exit"])
def test_a_pool_says_how_drafts_are_verified(manager: PluginManager, toy: str, use: str) -> None:
    parameters = {"layers": 2} if use == "early-exit" else {}
    options = SpeculationSpec(noise="gumbel", length="budget", max_drafts=1)
    pool = composed(manager, toy, speculator=Selection(use, parameters), speculation=options)
    worker = build(pool, id="w1", generation="g")
    try:
        generate(worker, [5, 6, 7, 8] * 10, 20)
        drafts = worker.engine.stats().drafts
        assert drafts is not None
        assert list(drafts.sources) == [use]
        assert len(drafts.total.drafted_at) == 1
        assert worker.engine.limits.speculation == options
    finally:
        worker.close()


def test_forced_lengths_are_held_against_the_drafter(manager: PluginManager, toy: str) -> None:
    """Again where it is built: only there do all drafters know how many drafts they make."""
    pool = composed(manager, toy, speculator=Selection("prompt-lookup", {"max_drafts": 2}))
    forced = msgspec.structs.replace(pool.spec, speculation=SpeculationSpec(acceptance_length=6.0))
    with pytest.raises(
        DeploymentError, match="needs 5 drafts a round, but speculator 'prompt-lookup' makes 2"
    ):
        build(replace(pool, spec=forced), id="w1", generation="g")


def test_fingerprints_name_the_representation(manager: PluginManager, toy: str, built: BuiltWorker) -> None:
    pool = composed(manager, toy)
    groups = built.executor.groups
    same = fingerprint(pool, built.architecture, groups)
    assert same == built.info.fp
    moved = msgspec.structs.replace(pool.model, name=f"/elsewhere/{Path(toy).name}")
    assert fingerprint(PoolComposition(moved, pool.spec, {}, ()), built.architecture, groups) == same
    double = msgspec.structs.replace(pool.model, dtype="float64")
    int8 = msgspec.structs.replace(pool.spec, quantizer=Selection("int8"))
    for model, spec in ((double, pool.spec), (pool.model, int8)):
        assert fingerprint(PoolComposition(model, spec, {}, ()), built.architecture, groups) != same


def test_fingerprints_tell_drafters_apart(manager: PluginManager, toy: str, built: BuiltWorker) -> None:
    """What one keeps is of no use to another, though it lie alike; host drafters keep nothing."""

    def name(path: str, *groups: KVGroup) -> str:
        pool = composed(manager, toy, speculator=Selection("eagle3", {"path": path}))
        return fingerprint(pool, built.architecture, (*built.executor.groups, *groups))

    own = boundary_group("draft", 8, 16, "float32")
    assert name("a", own) == name("a", own) != name("b", own)
    assert name("a") == name("b")


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ({"kv_tokens": None, "kv_memory": 9000}, DeploymentError, "kv_memory is 9,000 .* at least 12,288"),
        ({"kv_tokens": 15}, DeploymentError, "kv_tokens is 15; valid: at least one block of 16"),
        ({"kv_tokens": 1 << 50}, ResourceError, "lower kv_tokens"),
        ({"devices": 2}, UserError, "runs on 1 device, not on 2"),
        ({"device": "cuda:99"}, UserError, "device 'cuda:99' cannot be used"),
        ({"max_context": 4096}, UserError, "max_context is 4096"),
    ],
)
def test_what_cannot_be_built_is_named(
    manager: PluginManager, toy: str, spec: dict[str, object], error: type[BienError], says: str
) -> None:
    with pytest.raises(error, match=says):
        build(composed(manager, toy, **spec), id="w0", generation="g")  # type: ignore[arg-type]


def test_a_simulated_worker_needs_neither_weights_nor_torch(
    manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    worker = build(composed(manager, "smollm2-135m", executor=SIMULATED), id="w0", generation="g")
    assert len(generate(worker, [1, 2, 3], 5)) == 5
    assert (worker.info.vocab_size, worker.info.eos_token_ids) == (49152, (2,))
    worker.close()


def starts(manager: PluginManager, model: str, count: int, **spec: object) -> list[WorkerStart]:
    pool = PoolSpec(**{"kv_tokens": 512, "slots": 3, "count": count, **spec})  # type: ignore[arg-type]
    return assign(compose(Deployment(ModelSpec(model, max_context=256), pool=(pool,)), manager))


def test_assignment(manager: PluginManager, toy: str) -> None:
    one, two = starts(manager, toy, 2)
    assert (one.id, two.id) == ("main-0", "main-1")
    assert one.token == two.token != ""
    assert one.model.name == toy
    assert one.threads == max(1, available_cores() // 2)
    assert {ref.entry_point for ref in one.plugins} >= {"executors.torch", "schedulers.fcfs"}
    [alone] = starts(manager, toy, 1, threads=1)
    assert alone.threads == 1
    assert alone.token != one.token
    many = available_cores() + 1
    with pytest.raises(ResourceError, match=rf"{many} threads .* 1 x {many}\), {many - 1} cores are offered"):
        starts(manager, toy, 1, threads=many)
    pool, host = PoolSpec(threads=many), HostSpec(oversubscribe=True)
    [forced] = assign(compose(Deployment(ModelSpec(toy), pool=(pool,), host=host), manager))
    assert forced.threads == many


async def test_two_real_workers_say_the_same(manager: PluginManager, toy: str, built: BuiltWorker) -> None:
    prompt = list(range(3, 100))
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    want = generate(built, prompt, 16)
    said: list[str] = []
    workers = await launch(
        starts(manager, toy, 2, threads=1), lambda who, what: said.append(what), env={"BIEN_CHECK": "1"}
    )
    try:
        assert f"loading {toy}" in said
        generations = set()
        for worker in workers:
            client = await SocketClient.connect(worker.ready.host, worker.ready.port, worker.start.token)
            recorder = Recorder()
            client.attach(recorder)
            for rid in (1, 2):  # the second time from the cache
                client.submit(rid, GenerateRequest("r", TokenIds.of(prompt), sampling))
                await recorder.finished(rid)
                packed = b"".join(o.tokens for o in recorder.outputs[rid])
                assert list(TokenIds(packed).ids()) == want
            assert recorder.outputs[2][0].cached == 96
            generations.add(client.info.generation)
            assert client.info.fp == built.info.fp
            await client.close()
        assert len(generations) == 2
    finally:
        for worker in workers:
            await worker.stop()


async def test_a_child_names_what_it_lacks(manager: PluginManager, toy: str, tmp_path: Path) -> None:
    [start] = starts(manager, toy, 1, threads=1)
    old = msgspec.structs.replace(start.plugins[0], version="0.0.0.1")
    with pytest.raises(PluginError, match=r"composed with 0\.0\.0\.1"):
        await launch([msgspec.structs.replace(start, plugins=(old, *start.plugins[1:]))])
    folder = write_toy(tmp_path / "broken")
    (folder / "model.safetensors").unlink()
    [start] = starts(manager, str(folder), 1, threads=1)
    with pytest.raises(ModelError, match="has neither model.safetensors"):
        await launch([start])
