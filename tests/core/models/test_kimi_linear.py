"""Kimi-Linear against transformers, Kimi K3 against an oracle, in every way in which tokens are run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bien.core.build import build, fingerprint
from bien.core.clock import WallClock
from bien.core.compose import compose
from bien.core.deployment import Deployment, ModelSpec, PoolSpec
from bien.core.kv.hashing import extend_chain
from bien.core.plan import StateCopy
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.plugins.kv_stores.host import bien_providers as host_stores
from tests.core.executors.driver import Driver
from tests.core.models.kimi_oracle import VOCAB, Oracle, k3_config, linear_config, write_tiny
from tests.core.test_exactness import conversations, harness, play, watch

Logits = NDArray[np.float64]
GREEDY = SamplingParams(12, temperature=0.0, ignore_eos=True)


class Library:
    """transformers' logits, with the text computed at once. Some of it is float32 whatever one asks for."""

    bound = 1e-4
    dtype = "float32"

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, tokens: list[int]) -> Logits:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].double().numpy()  # type: ignore[no-any-return]


class Single(Oracle):
    bound = 1e-4
    dtype = "float32"


class Double(Oracle):
    bound = 1e-10
    dtype = "float64"


KINDS: dict[str, Any] = {
    "kimi-linear, transformers": (linear_config, Library),
    "kimi-k3, float32": (k3_config, Single),
    "kimi-k3": (k3_config, Double),
}


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config, kind = KINDS[request.param]
    folder = write_tiny(tmp_path_factory.mktemp("kimi"), config())
    made = kind(folder)
    made.folder = folder
    return made


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("k3"), k3_config())


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def driver(reference: Any, **options: Any) -> Driver:
    return Driver(reference.folder, dtype=reference.dtype, **options)


def check(d: Driver, reference: Any) -> None:
    """Each logit row of the last step: they come after all but the gained token of a slot's text."""
    assert d.logits
    for slot, rows in d.logits.items():
        assert len(rows) == 1
        near(rows[0], reference.logits(d.content[slot][:-1])[-1], reference)


def near(found: Logits, exact: Logits, reference: Any) -> None:
    worst = np.abs(found - exact).max() / np.abs(exact).max()
    assert worst <= reference.bound, worst


def test_prefill_and_decode(reference: Any) -> None:
    d = driver(reference)
    slot = d.add(text(1, 43))
    d.step({slot: 43})
    check(d, reference)
    for _ in range(5):
        d.step({slot: 1})
        check(d, reference)


def test_chunked_prefill(reference: Any) -> None:
    d = driver(reference, shuffle=3)
    slot = d.add(text(2, 75))
    for chunk in (1, 2, 20, 1, 38):
        d.step({slot: chunk})
        assert not d.logits
    d.step({slot: 13})
    check(d, reference)


def test_ragged_mix_of_prefill_and_decode(reference: Any) -> None:
    d = driver(reference, shuffle=4)
    a, b = d.add(text(3, 40)), d.add(text(4, 2))
    d.step({a: 40, b: 2})
    check(d, reference)
    c, e = d.add(text(5, 37)), d.add(text(6, 9))
    d.step({b: 1, c: 20, a: 1, e: 9})
    check(d, reference)
    d.step({e: 1, c: 17, b: 1, a: 1})
    check(d, reference)
    d.step({a: 1, b: 1, c: 1, e: 1})
    check(d, reference)


def test_prefix_hit_through_a_snapshot(reference: Any) -> None:
    """Another text goes on from the states that one left at the end of what they share."""
    d = driver(reference)
    shared = text(7, 40)
    a = d.add(shared + text(8, 5))
    states = {g: d.free[g].pop() for g, group in enumerate(d.groups) if not group.paged}
    assert len(states) == 2
    copies = [StateCopy(g, a, 40, d.tables[a][g][0], block) for g, block in states.items()]
    d.step({a: 40}, snapshots=copies)
    d.step({a: 5})
    b = d.add(shared + text(9, 11), like=(a, 5), states=states)
    d.step({a: 1, b: 11})
    check(d, reference)
    d.step({a: 1, b: 1})
    check(d, reference)


def test_preempted(reference: Any) -> None:
    d = driver(reference, slots=2)
    prompt = text(10, 30)
    a, b = d.add(prompt), d.add(text(11, 20))
    d.step({a: 30, b: 20})
    d.step({a: 1, b: 1})
    known = d.release(a)
    d.step({b: 1})
    again = d.add(known, prompt=len(prompt))
    d.step({again: len(known), b: 1})
    check(d, reference)


@pytest.mark.parametrize("right", range(4))
def test_rows_with_drafts(reference: Any, right: int) -> None:
    """Drafts of which the first ones are right, beside a plain row, a short and a long chunk: what was
    rejected has left no trace in either state."""
    d = driver(reference, shuffle=5)
    a, b, c, e = (d.add(text(12 + i, 25 + 6 * i)) for i in range(4))
    d.step({a: 25, b: 31, c: 30})
    ahead = reference_greedy(reference, d.content[a], 3)
    drafts = [t if i < right else (t + 1) % VOCAB for i, t in enumerate(ahead)]
    before = list(d.content[a])
    gained = d.step({a: 1, b: 1, c: 7, e: 20}, {a: drafts, b: [1]})
    assert gained[a][:right] == ahead[:right] and len(gained[a]) == right + 1
    for j in range(4):
        near(d.logits[a][j], reference.logits(before + drafts[:j])[-1], reference)
    for _ in range(2):
        d.step({a: 1, b: 1, c: 1})
        check(d, reference)


def reference_greedy(reference: Any, known: list[int], count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(int(reference.logits(known + out)[-1].argmax()))
    return out


def test_one_long_row_of_drafts(k3: Path) -> None:
    """More drafts than a row that goes token by token has."""
    d, oracle = Driver(k3, dtype="float64"), Oracle(k3)
    a = d.add(text(20, 20))
    d.step({a: 20})
    known = list(d.content[a])
    ahead: list[int] = []
    for _ in range(14):
        ahead.append(int(oracle.logits(known + ahead)[-1].argmax()))
    drafts = [*ahead[:9], *((t + 1) % VOCAB for t in ahead[9:])]
    assert d.step({a: 1}, {a: drafts})[a] == ahead[:10]
    d.step({a: 1})
    exact = oracle.logits(d.content[a][:-1])[-1]
    assert np.abs(d.logits[a][0] - exact).max() <= 1e-10 * np.abs(exact).max()


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As K3's checkpoint has them: codes of E2M1 in pairs and a power of two for each 32 of a row."""
    config = k3_config(routed_expert_hidden_size=32, moe_intermediate_size=64, num_hidden_layers=7)
    plain, packed = write_tiny(tmp_path / "plain", config), tmp_path / "packed"
    tensors = load_file(plain / "model.safetensors")
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    rng, stored = np.random.default_rng(5), {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        codes = rng.integers(0, 16, (rows, columns), np.uint8)
        scales = rng.integers(123, 127, (rows, columns // 32), np.uint8)
        tensors[name] = levels[codes] * np.exp2(scales.astype(np.float32) - 127).repeat(32, 1)
        own = name.removesuffix(".weight")
        stored[f"{own}.weight_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
        stored[f"{own}.weight_scale"] = scales
    save_file(tensors, plain / "model.safetensors")
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    config["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(config))
    save_file(stored, packed / "model.safetensors")
    d = Driver(packed, dtype="float64")
    slot = d.add(text(70, 20))
    d.step({slot: 20})
    exact = Oracle(plain).logits(text(70, 20))[-1]
    assert np.abs(d.logits[slot][0] - exact).max() <= 1e-10 * np.abs(exact).max()


# -- through the engine: one greedy text, whatever is cached, evicted, restored, drafted or cut

WAYS: dict[str, dict[str, Any]] = {
    "small chunks, overlap": {"budget": 7, "depth": 2},
    "preempted": {"blocks": 18, "depth": 2},
    "prompt lookup": {"drafter": "prompt-lookup"},
    "prompt lookup, preempted, few snapshots, host tier": {
        "drafter": "prompt-lookup", "blocks": 18, "snapshots": 3, "store": True,
    },
}  # fmt: skip


def small(config: Any) -> dict[str, Any]:
    own = config().get("text_config", config())["linear_attn_config"]
    own |= {"full_attn_layers": [2], "kda_layers": [1, 3]}
    made = config(num_hidden_layers=3, linear_attn_config=own)
    if config is k3_config:
        made["text_config"]["attn_res_block_size"] = 2
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("config", [linear_config, k3_config])
def test_the_text_is_the_same(config: Any, tmp_path: Path) -> None:
    """Sessions of several turns under eviction say what they say without any cache."""
    folder = write_tiny(tmp_path / "model", small(config))
    prompts, reference = [turns[0] for turns in conversations()], []
    for _ in range(2):
        for i, turns in enumerate(conversations()):
            h = harness(folder, slots=1)
            h.submit("x", prompts[i], sampling=GREEDY)
            h.run()
            reference.append(h.tokens["x"])
            prompts[i] = prompts[i] + h.tokens["x"] + turns[1]
    alone = harness(folder, slots=1)
    assert play(alone, GREEDY, together=False) == reference, "prefix hits"
    assert alone.cached["1/0"] > 0
    for name, way in WAYS.items():
        h = harness(folder, **way)
        assert play(h, GREEDY, together=True) == reference, name
        stats = h.engine.stats()
        assert stats.preemptions > 0 or not way.get("blocks") or way.get("store"), name
        assert stats.drafted > 0 or not way.get("drafter"), name
        h.engine.close()


@pytest.mark.parametrize(("every", "hit"), [(0, 0), (32, 32)])
def test_a_deployment_says_where_states_are_kept(every: int, hit: int, k3: Path) -> None:
    """Two texts share a beginning at whose end neither has an end of a turn."""
    pool = PoolSpec(kv_tokens=512, slots=2, snapshot_tokens=every)
    model = ModelSpec(str(k3), max_context=128)
    worker = build(
        compose(Deployment(model, pool=(pool,)), PluginManager.load("")).pools[0], id="w", generation="g"
    )
    shared, cached = text(60, 45), []
    for i in range(2):
        prompt = TokenIds.of(shared + text(61 + i, 20))
        worker.engine.submit(GenerateRequest(f"r{i}", prompt, SamplingParams(1, temperature=0.0)))
        while worker.engine.busy:
            plan = worker.engine.begin()
            assert plan is not None
            report = worker.engine.finish(worker.executor.sample(worker.executor.forward(plan)).result())
            cached += [o.cached for o in report.outputs if o.cached >= 0]
    assert cached == [0, hit]
    assert worker.info.snapshot_tokens == (0, every, every)
    usual = compose(Deployment(model, pool=(PoolSpec(slots=2),)), PluginManager.load("")).pools[0]
    assert worker.info.fp == fingerprint(usual, worker.architecture, worker.architecture.groups)
    worker.close()


def test_logits_after_eviction_and_a_reload_from_the_host_tier(k3: Path) -> None:
    prompt, others = text(30, 60), [text(31 + i, 60) for i in range(6)]
    h = harness(k3, blocks=18, snapshots=4, dtype="float32")
    provider = next(iter(host_stores()))
    store = provider.factory(
        provider.config_type(capacity_bytes=1 << 24), Context(groups=h.groups, io=h.executor.io)
    )
    h.use_store(store)
    seen, once = watch(h), SamplingParams(1, temperature=0.0, ignore_eos=True)
    h.submit("cold", prompt, sampling=once)
    h.run()
    cold = seen[-1]
    for i, other in enumerate(others):
        h.submit(f"o{i}", other, sampling=once)
        h.run()
    chain = extend_chain(b"", b"", TokenIds.of(prompt), h.groups[0].block_tokens, len(prompt))
    assert not h.cache.match(chain).blocks, "it must have left the device"
    clock = WallClock()
    for _ in range(5000):  # saves run beside the engine
        if all(store.lookup(0, chain)):
            break
        clock.block(0.001)
    h.submit("warm", prompt, sampling=once)
    h.run()
    assert h.cached["warm"] > 40
    assert abs(seen[-1] - cold).max() <= 1e-4 * abs(cold).max()
    h.engine.close()


# -- parts


def test_the_oracle_agrees_with_transformers(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", linear_config())
    tokens = text(50, 40)
    near(Library(folder).logits(tokens), Oracle(folder).logits(tokens), Library)


def test_states_stay_float32_in_bfloat16(k3: Path) -> None:
    d = Driver(k3, dtype="bfloat16")
    assert {g.name: g.dtype for g in d.groups} == {
        "latent": "bfloat16", "state": "float32", "conv": "bfloat16",
    }  # fmt: skip
    mixer = d.executor.model.layers[0].mixer
    assert mixer.speed.dtype == mixer.bias.dtype == torch.float32
    slot = d.add(text(40, 30))
    d.step({slot: 30})
    exact = Oracle(k3).logits(text(40, 30))[-1]
    assert np.corrcoef(d.logits[slot][0], exact)[0, 1] > 0.9  # rounding chooses other experts here and there
    assert d.executor.pools[1].data.dtype == torch.float32


def test_early_layers_can_be_filled_for_a_drafter(k3: Path) -> None:
    """`fill` of a layer behind the first block writes what a forward wrote."""
    d = Driver(k3, dtype="float64")
    slot = d.add(text(41, 20))
    seen: list[tuple[Any, Any]] = []
    layer = d.executor.model.layers[4]  # latent attention in the second block
    right = type(layer).__call__

    class Watched(type(layer)):  # type: ignore[misc]
        def __call__(self, hidden: Any, rows: Any) -> Any:
            seen.append((hidden.clone(), rows))
            return right(self, hidden, rows)

    layer.__class__ = Watched
    d.step({slot: 20})
    hidden, rows = seen[0]
    pool = d.executor.pools[0].data
    written = pool.clone()
    pool[1] = 0  # the second layer with latents
    with torch.inference_mode():
        layer.fill(hidden, rows)
    torch.testing.assert_close(pool[:, 1:], written[:, 1:])
