"""The estimate before workers start: what is counted, and what is said where it does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bien.core.compose import Composition, compose
from bien.core.deployment import parse_deployment
from bien.core.errors import ModelError, ResourceError, UserError
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.core.worker.footprint import PROCESS, TORCH, Footprint
from bien.core.worker.memory import _COLUMNS, GATEWAY, check_memory, plan_memory

GB = 10**9


def composed(model: Path | str, host: dict[str, Any] | None = None, **pool: Any) -> Composition:
    raw = {"model": {"name": str(model)}, "pool": [{"kv_tokens": 1600, **pool}], "host": host or {}}
    if "kv_memory" in pool:
        del raw["pool"][0]["kv_tokens"]  # type: ignore[index]
    return compose(parse_deployment(raw), PluginManager.load(""))


def one(model: Path | str, **pool: Any) -> Footprint:
    composition = composed(model, **pool)
    [worker] = plan_memory(composition, composition.model, 0).workers
    return worker


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "llama")


def test_weights_and_kv(toy: Path) -> None:
    worker = one(toy)
    # Float32 in the file as in memory, but for the file's header; 3 layers, K and V of 2 heads of 8.
    size = (toy / "model.safetensors").stat().st_size
    assert size - 5000 < worker.weights < size
    assert worker.kv == (1600 + 16) * 3 * 2 * 2 * 8 * 4
    table = 288 * 48 * 4
    int8 = one(toy, quantizer="int8").weights
    assert (int8 - table) * 4 == worker.weights - table, "the head stays, and is the embedding"
    assert one(toy, quantizer={"use": "int8", "head": True}).weights == int8 + table // 4
    size = (write_toy(toy.parent / "qwen", "qwen3") / "model.safetensors").stat().st_size
    assert size - 5000 < one(toy.parent / "qwen").weights < size, "an untied head is a table of its own"
    assert worker.process == PROCESS + TORCH


def test_a_drafter_and_a_store_are_counted(toy: Path) -> None:
    plain = one(toy)
    assert one(toy, speculator={"use": "early-exit", "layers": 1}).kv == plain.kv * 4 // 3
    assert one(toy, speculator="prompt-lookup").kv == plain.kv
    assert one(toy, kv_store="host").store == 1 << 30
    assert one(toy, kv_store={"use": "host", "capacity_bytes": 77}).store == 77
    assert one(toy, kv_store={"use": "host", "capacity_blocks": 10}).store == 160 * 3 * 2 * 2 * 8 * 4


def test_the_workspace_grows_with_what_a_step_may_hold(toy: Path) -> None:
    base = one(toy, slots=4).workspace
    assert one(toy, slots=8).workspace > base
    assert one(toy, slots=4, scheduler={"use": "fcfs", "token_budget": 1024}).workspace > base
    assert one(toy, slots=4, speculator="prompt-lookup").workspace > base


def test_bytes_are_said_in_tokens(toy: Path) -> None:
    worker = one(toy, kv_memory="1MiB")
    assert worker.pool.kv_tokens == 2704
    assert worker.kv <= 1 << 20 < worker.kv + 6144


def test_ranks_share_layers_and_repeat_the_rest(toy: Path) -> None:
    single, double = one(toy), one(toy, devices=2, parallel="tensor")
    table = 288 * 48 * 4
    assert double.weights == single.weights + table
    assert double.kv == single.kv
    assert double.process == 2 * single.process
    assert one(toy, devices=6, parallel="tensor").kv == 3 * single.kv, "two KV heads on six ranks"


def test_devices_that_the_strategy_cannot_use_are_refused(toy: Path) -> None:
    with pytest.raises(UserError, match="'single' runs on 1 device, not on 2"):
        one(toy, devices=2)
    with pytest.raises(UserError, match="'tensor' cannot cut .* into 3 parts"):
        one(toy, devices=3, parallel="tensor")


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    composition = composed("smollm2-135m", count=5, kv_tokens=16_000)
    plan = plan_memory(composition, composition.model, 8 * GB)
    [worker] = plan.workers
    assert plan.need == GATEWAY + 5 * worker.total
    with pytest.raises(ResourceError) as caught:
        check_memory(composition, composition.model, plan.need - 1)
    first, *table = str(caught.value).split("\n")
    assert first.startswith(f"the deployment needs {-(-plan.need // 10**6):,} MB of memory, ")
    assert "lower kv_tokens (about 15,936 for pool 'main' would fit) or count" in first
    assert re.split("  +", table[1].strip()) == list(_COLUMNS)
    numbers = (worker.weights, worker.kv, 0, worker.workspace, worker.process, worker.total)
    assert table[2].split() == ["main", "5", "x", "16,000", *(f"{-(-n // 10**6):,}" for n in numbers)]
    assert check_memory(composition, composition.model, plan.need) == plan_memory(
        composition, composition.model, plan.need
    )


def test_the_advice_fits() -> None:
    composition = composed("smollm2-135m", count=5, kv_tokens=16_000)
    with pytest.raises(ResourceError, match=r"about ([\d,]+) for pool") as caught:
        check_memory(composition, composition.model, 7 * GB)
    tokens = int(str(caught.value).partition("about ")[2].partition(" ")[0].replace(",", ""))
    lower = composed("smollm2-135m", count=5, kv_tokens=tokens)
    check_memory(lower, lower.model, 7 * GB)
    with pytest.raises(ResourceError, match="lower count, kv_tokens or slots of the pools, take a smaller"):
        check_memory(composition, composition.model, 3 * GB)  # not even without KV


def test_a_budget_is_held(toy: Path) -> None:
    composition = composed("smollm2-135m", {"memory": "1GiB"}, kv_tokens=16_000)
    with pytest.raises(ResourceError, match=r"1,074 MB are available \(host.memory\); lower kv_tokens"):
        check_memory(composition, composition.model, 100 * GB)
    tight = composed("smollm2-135m", {"memory": "512MiB"})
    with pytest.raises(
        ResourceError, match="take a smaller model.dtype or a quantizer, or raise host.memory"
    ):
        check_memory(tight, tight.model, 100 * GB)
    generous = composed("smollm2-135m", {"memory": "100GiB"})
    with pytest.raises(ResourceError, match="500 MB are available;"):
        check_memory(generous, generous.model, GB // 2)
    forced = composed("smollm2-135m", {"memory": "512MiB", "oversubscribe": True})
    assert not check_memory(forced, forced.model, 100 * GB).fits


def test_a_small_pool_is_said() -> None:
    composition = composed("smollm2-135m", kv_tokens=8000)
    [said] = plan_memory(composition, composition.model).small_pools()
    assert said == (
        "pool 'main': KV holds 8,000 tokens, less than the context window of 8,192: "
        "longer requests are refused"
    )
    composition = composed("smollm2-135m", kv_tokens=8192)
    assert plan_memory(composition, composition.model).small_pools() == []


def test_what_is_not_known_is_said(toy: Path) -> None:
    cuda = one(toy, device="cuda")
    assert (cuda.weights, cuda.kv) == (0, 0)
    assert cuda.unknown == ("memory of cuda; workers ask it when they start",)
    assert one("smollm2-135m", executor="simulated").total == PROCESS
    with pytest.raises(ModelError, match="no folder and no built-in name"):
        one("no-such-model")
