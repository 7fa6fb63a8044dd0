"""One text, whatever the engine does: float64, tiny torch models, every way of running a request.

Batches, chunks, prefix hits, preemption, a host tier, prompt lookup and early exit, overlap; greedy and
sampled. The reference runs each request alone, in one chunk, on an empty cache. In float32 the logits
after a reload from the host tier equal those without one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bien.core.clock import WallClock
from bien.core.kv.hashing import extend_chain
from bien.core.providers import Context
from bien.core.request import SamplingParams, TokenIds
from bien.core.speculation.draft import Draft
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import DeviceDraft, SpeculatorCaps
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.plugins.kv_stores.host import bien_providers as host_stores
from bien.plugins.parallel.single import bien_providers as strategies
from bien.plugins.quantizers.none import bien_providers as quantizers
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.speculators.early_exit import bien_providers as early_exits
from bien.plugins.speculators.prompt_lookup import PromptLookup, PromptLookupConfig
from bien.plugins.speculators.prompt_lookup import bien_providers as prompt_lookups
from tests.core.executors.latent_models import INDEXER, draw

MODELS = ["llama", "qwen3", "hybrid", "glm-5", "gpt_oss"]
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "token by token": {"budget": 1},
    "small chunks, overlap": {"budget": 7, "depth": 2},
    "preempted": {"blocks": 18, "depth": 2},
    "host tier": {"blocks": 18, "store": True},
    "prompt lookup": {"drafter": "prompt-lookup"},
    "prompt lookup, preempted, host tier": {"drafter": "prompt-lookup", "blocks": 18, "store": True},
    "early exit": {"drafter": "early-exit"},
    "early exit, preempted, host tier": {"drafter": "early-exit", "blocks": 18, "store": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    made = {kind: write_toy(base / kind, kind) for kind in ("llama", "qwen3", "gpt_oss")}
    made["hybrid"] = write_tiny_hybrid(base / "hybrid")
    choosing = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], **INDEXER}
    return made | {"glm-5": draw(base / "glm-5", "glm_moe_dsa", **choosing)}


def harness(
    folder: Path,
    budget: int = 512,
    drafter: str = "",
    store: bool = False,
    kernels: Any = None,
    length: str = "fixed",
    **fields: Any,
) -> TorchHarness:
    ctx = Context()
    parts = {"quantizer": _make(quantizers, ctx), "parallel": _make(strategies, ctx)}
    if kernels is not None:
        parts["kernels"] = kernels
    if drafter == "prompt-lookup":
        parts["speculator"] = _make(prompt_lookups, ctx, min_ngram=1)
    elif drafter == "branching":
        parts["speculator"] = Branching()
    elif drafter:
        parts["speculator"] = _make(early_exits, ctx, layers=1)
    fields["speculation"] = SpeculationSpec(length=length)  # type: ignore[arg-type]
    h = TorchHarness(folder, Fcfs(FcfsConfig(token_budget=budget)), parts, **fields)
    if store:
        h.use_store(_make(host_stores, Context(groups=h.groups, io=h.executor.io), capacity_bytes=1 << 24))
    return h


def _make(providers: Any, ctx: Context, **parameters: Any) -> Any:
    provider = next(iter(providers()))
    return provider.factory(provider.config_type(**parameters), ctx)


def conversations() -> list[list[list[int]]]:
    """Three sessions that share a beginning; each turn's prompt is followed by what the user adds."""
    rng = random.Random(4)
    shared = [rng.randrange(3, 90) for _ in range(20)]
    phrase = [rng.randrange(3, 90) for _ in range(9)]
    return [[shared + phrase * (i + 1), [rng.randrange(3, 90) for _ in range(6)] + phrase] for i in range(3)]


def play(h: TorchHarness, sampling: SamplingParams, together: bool) -> list[list[int]]:
    """Two turns of every session; what each turn said."""
    said: list[list[int]] = []
    prompts = [turns[0] for turns in conversations()]
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            h.submit(f"{turn}/{i}", prompt, sampling=sampling)
            if not together:
                h.run()
        h.run()
        for i, turns in enumerate(conversations()):
            said.append(h.tokens[f"{turn}/{i}"])
            prompts[i] = prompts[i] + h.tokens[f"{turn}/{i}"] + turns[1]
    return said


@pytest.mark.parametrize("sampling", [
    SamplingParams(16, temperature=0.0, ignore_eos=True, seed=5),
    SamplingParams(16, temperature=0.9, top_p=0.95, top_k=40, ignore_eos=True, seed=5),
    SamplingParams(16, temperature=0.0, seed=5, ignore_eos=True, repetition_penalty=1.2,
                   frequency_penalty=0.05, presence_penalty=0.1, logit_bias=((7, 0.2), (11, -1.0))),
    SamplingParams(16, temperature=0.9, min_p=0.02, seed=5, ignore_eos=True, repetition_penalty=1.2,
                   frequency_penalty=0.05, min_tokens=16, stop_token_ids=tuple(range(3, 60))),
], ids=["greedy", "sampled", "greedy, penalties", "sampled, penalties, min_p, min_tokens"])  # fmt: skip
@pytest.mark.parametrize("model", MODELS)
def test_the_text_is_the_same(model: str, sampling: SamplingParams, folders: dict[str, Path]) -> None:
    alone = harness(folders[model], slots=1)
    reference = []
    prompts = [turns[0] for turns in conversations()]
    for _ in range(2):
        for i, turns in enumerate(conversations()):
            h = harness(folders[model], slots=1)
            h.submit("x", prompts[i], sampling=sampling)
            h.run()
            reference.append(h.tokens["x"])
            prompts[i] = prompts[i] + h.tokens["x"] + turns[1]
    assert play(alone, sampling, together=False) == reference, "prefix hits"
    assert alone.cached["1/0"] > 0
    for name, way in WAYS.items():
        if model in ("hybrid", "glm-5", "gpt_oss") and way.get("drafter") == "early-exit":
            continue  # refused at start: its first layers are not attention over everything
        h = harness(folders[model], **way)
        assert play(h, sampling, together=True) == reference, name
        stats = h.engine.stats()
        if way.get("blocks"):
            assert stats.preemptions > 0 or way.get("store"), name
        if way.get("drafter"):
            assert stats.drafted > 0, name
        h.engine.close()


class Branching(PromptLookup):
    """Trees: what prompt lookup says, each token behind a wrong sibling, so that paths must be moved."""

    def __init__(self) -> None:
        super().__init__(PromptLookupConfig(max_drafts=6, min_ngram=1))
        self.caps = SpeculatorCaps(place="host", max_drafts=6, topology="tree")

    def propose(self, id: str, limit: int) -> Draft:
        out = Draft([], [])
        assert out.parents is not None
        for token in super().propose(id, limit // 2).tokens:
            out.parents += [len(out) - 1] * 2
            out.tokens += [(token + 1) % 90, token]
        return out


@pytest.mark.parametrize("way", [
    {"drafter": "branching", "blocks": 20, "store": True},
    {"drafter": "prompt-lookup", "length": "budget"},
    {"drafter": "early-exit", "blocks": 20, "store": True, "length": "budget"},
    {"blocks": 20},
], ids=str)  # fmt: skip
def test_the_text_is_the_same_with_predictions(way: dict[str, Any], folders: dict[str, Path]) -> None:
    """Of clients: the right text, a wrong one, and one with an edit; beside any drafter."""
    sampling = SamplingParams(16, temperature=0.9, seed=5, ignore_eos=True, repetition_penalty=1.1)
    h = harness(folders["llama"], slots=1)
    reference = play(h, sampling, together=False)
    h = harness(folders["llama"], **way)
    prompts = [turns[0] for turns in conversations()]
    for i, prompt in enumerate(prompts):
        text = [reference[i], [7] * 20, reference[i][:6] + [1, 2, 3] + reference[i][7:]][i]
        h.submit(f"0/{i}", prompt, sampling=sampling, prediction=TokenIds.of(text))
    h.run()
    assert [h.tokens[f"0/{i}"] for i in range(3)] == reference[:3]
    drafts = h.engine.stats().drafts
    assert drafts is not None
    assert drafts.sources["prediction"].accepted >= 16
    assert len(drafts.sources) == (2 if way.get("drafter") else 1)
    h.engine.close()


@pytest.mark.parametrize("method", ["absorb", "propose"])
@pytest.mark.parametrize("wild", [False, True])
def test_a_device_drafter_that_fails_is_left_out(
    method: str, wild: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(16, temperature=0.0, ignore_eos=True)
    want = play(harness(folders["llama"]), greedy, together=True)
    h = harness(folders["llama"], drafter="early-exit")
    right, calls = getattr(h.executor.drafter, method), []

    def fails(*arguments: Any) -> Any:
        calls.append(method)
        if len(calls) < 4:
            return right(*arguments)
        if wild and method == "propose":
            return DeviceDraft(right(*arguments).tokens + 10_000)
        raise RuntimeError("boom")

    monkeypatch.setattr(h.executor.drafter, method, fails)
    assert play(h, greedy, together=True) == want
    assert len(calls) == 4
    assert h.engine.stats().drafted > 0


@pytest.mark.parametrize("model", MODELS)
def test_logits_after_a_reload_from_the_host_tier(model: str, folders: dict[str, Path]) -> None:
    prompt = [random.Random(8).randrange(3, 90) for _ in range(60)]
    others = [[random.Random(i).randrange(3, 90) for _ in range(60)] for i in range(20, 26)]
    h = harness(folders[model], blocks=18, dtype="float32")
    store = _make(host_stores, Context(groups=h.groups, io=h.executor.io), capacity_bytes=1 << 24)
    h.use_store(store)
    seen = watch(h)
    sampling = SamplingParams(1, temperature=0.0, ignore_eos=True)
    h.submit("cold", prompt, sampling=sampling)
    h.run()
    cold = seen[-1]
    for i, other in enumerate(others):
        h.submit(f"o{i}", other, sampling=sampling)
        h.run()
    chain = extend_chain(b"", b"", TokenIds.of(prompt), h.groups[0].block_tokens, len(prompt))
    assert not h.cache.match(chain).blocks, "it must have left the device"
    clock = WallClock()
    for _ in range(5000):  # saves run beside the engine
        if all(store.lookup(0, chain)):
            break
        clock.block(0.001)
    h.submit("warm", prompt, sampling=sampling)
    h.run()
    assert h.cached["warm"] > 40
    assert abs(seen[-1] - cold).max() <= 1e-4 * abs(cold).max()
    h.engine.close()


def watch(h: TorchHarness) -> list[Any]:
    """Logits of every sampled row, as numpy arrays, as they come."""
    seen: list[Any] = []
    model = h.executor.model
    head = model.head

    def watched(hidden: Any) -> Any:
        logits = head(hidden)
        seen.extend(logits.detach().clone().numpy())
        return logits

    model.head = watched
    return seen
