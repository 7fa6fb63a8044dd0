"""Several ranks say what one says: float64, tiny models, every way of running a request.

The same conversations and ways as in test_exactness.py; ranks are threads here, processes in test_group.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bien.core.architectures.registry import read_architecture
from bien.core.executors.make import load_executor
from bien.core.providers import Context
from bien.core.request import SamplingParams
from bien.core.speculation.options import SpeculationSpec
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.plugins.kv_stores.host import bien_providers as host_stores
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.int4 import bien_providers as int4
from bien.plugins.quantizers.int8 import bien_providers as int8
from bien.plugins.quantizers.none import bien_providers as no_quantizers
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.speculators.early_exit import EarlyExit, EarlyExitConfig
from bien.plugins.speculators.early_exit import bien_providers as early_exits
from bien.plugins.speculators.prompt_lookup import bien_providers as prompt_lookups
from tests.core.executors.bushy import Bushy
from tests.core.parallel.thread_group import thread_group
from tests.core.test_exactness import WAYS, _make, harness, play

GREEDY = SamplingParams(12, temperature=0.0, ignore_eos=True, seed=5)
SAMPLED = SamplingParams(12, temperature=0.9, top_p=0.95, repetition_penalty=1.2, ignore_eos=True, seed=5)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {}),
    "untied, biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "3 kv heads": ("llama", {"num_key_value_heads": 3, "vocab_size": 261}),
    "1 kv head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 16}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "hybrid": ("tiny_hybrid", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "glm4-moe": ("glm4_moe", {"num_key_value_heads": 1}),
    "gpt-oss": ("gpt_oss", {"num_key_value_heads": 3}),
}
# Of every model all ways on 2 ranks would take a minute; any load of one of them comes below.
CASES = [
    ("tied", 2, ["batched", "host tier", "prompt lookup", "early exit, preempted, host tier"]),
    ("untied, biases", 2, ["small chunks, overlap"]),
    ("3 kv heads", 2, ["host tier"]),
    ("3 kv heads", 3, ["early exit, preempted, host tier"]),
    ("1 kv head", 3, ["prompt lookup, preempted, host tier"]),
    ("qwen3", 2, ["preempted", "early exit"]),
    ("qwen3-moe", 2, ["early exit"]),
    ("glm4-moe", 2, ["small chunks, overlap"]),
    ("gpt-oss", 2, ["prompt lookup, preempted, host tier"]),
    ("gpt-oss", 3, ["batched"]),
    ("hybrid", 2, ["small chunks, overlap", "preempted", "host tier", "prompt lookup, preempted, host tier"]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    made = {}
    for name, (kind, changes) in MODELS.items():
        folder = base / name.replace(" ", "-")
        made[name] = (
            write_tiny_hybrid(folder, **changes)
            if kind == "tiny_hybrid"
            else write_toy(folder, kind, **changes)
        )
    return made


def group_harness(
    folder: Path, world: int, budget: int = 512, drafter: str = "", store: bool = False, **fields: Any
) -> TorchHarness:
    def parts(ctx: Context) -> dict[str, Any]:
        found = {"quantizer": _make(no_quantizers, ctx)}
        if drafter == "early-exit":
            found["speculator"] = _make(early_exits, ctx, layers=1)
        return found

    host = {"speculator": _make(prompt_lookups, Context(), min_ngram=1)} if drafter == "prompt-lookup" else {}
    group = thread_group(folder, world, parts, dtype=fields.get("dtype", "float64"))
    h = TorchHarness(folder, Fcfs(FcfsConfig(token_budget=budget)), host, executor=group, **fields)
    if store:
        h.use_store(_make(host_stores, Context(groups=h.groups, io=group.io), capacity_bytes=1 << 24))
    return h


@pytest.mark.parametrize(("model", "world", "ways"), CASES, ids=[f"{m}, {w} ranks" for m, w, _ in CASES])
def test_the_text_is_that_of_one_rank(
    model: str, world: int, ways: list[str], folders: dict[str, Path]
) -> None:
    for sampling in (GREEDY, SAMPLED):
        reference = play(harness(folders[model]), sampling, together=True)
        assert len({tuple(said) for said in reference}) > 3
        for name in ways:
            way = WAYS[name]
            h = group_harness(folders[model], world, **way)
            assert play(h, sampling, together=True) == reference, name
            stats = h.engine.stats()
            if way.get("drafter"):
                assert stats.drafted > 0, name
                assert stats.accepted > 0 or sampling is SAMPLED, name
            h.engine.close()
            h.executor.close()


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path]) -> Iterator[tuple[Any, Any]]:
    """One rank and two, with a device drafter, for any number of engines one after the other."""
    alone = harness(folders["3 kv heads"], drafter="early-exit").executor
    group = group_harness(folders["3 kv heads"], 2, drafter="early-exit").executor
    yield alone, group
    group.close()


@settings(max_examples=12)
@given(data=st.data())
def test_any_load_gives_the_text_of_one_rank(
    data: st.DataObject, pair: tuple[Any, Any], folders: dict[str, Path]
) -> None:
    """Requests of any number and length that come at any time, some of them aborted, on shared beginnings."""
    beginning = data.draw(st.lists(st.integers(3, 90), max_size=40), label="beginning")
    requests = data.draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(3, 90), min_size=1, max_size=30),
                st.integers(1, 16),  # tokens
                st.integers(0, 8),  # steps before the next one comes
                st.sampled_from([GREEDY, SAMPLED, replace(SAMPLED, speculate=False)]),
                st.booleans() if data.draw(st.booleans()) else st.just(False),  # aborted there
            ),
            min_size=1,
            max_size=6,
        ),
        label="requests",
    )
    shape = data.draw(
        st.fixed_dictionaries(
            {"blocks": st.integers(14, 40), "slots": st.integers(1, 4), "depth": st.integers(1, 2)}
        ),
        label="shape",
    )
    budget = data.draw(st.integers(1, 64), label="budget")
    texts = []
    for executor in pair:
        scheduler = Fcfs(FcfsConfig(token_budget=budget))
        h = TorchHarness(folders["3 kv heads"], scheduler, {}, executor=executor, **shape)
        for i, (tail, tokens, steps, sampling, aborted) in enumerate(requests):
            asked = replace(sampling, max_tokens=tokens, seed=i)
            h.submit(str(i), beginning + tail, sampling=asked)
            for _ in range(steps):
                h.step()
            if aborted:
                h.engine.abort(str(i))
        h.run()
        h.engine.close()
        texts.append({id: text for id, text in h.tokens.items() if h.finish.get(id) == "length"})
    assert texts[0] == texts[1]
    assert len(texts[0]) >= sum(not r[4] for r in requests)


def test_logprobs_are_those_of_one_rank(folders: dict[str, Path]) -> None:
    asking = SamplingParams(6, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    found = []
    for h in (harness(folders["tied"]), group_harness(folders["tied"], 2)):
        results = []
        finish = h.engine.finish

        def taking(result: Any, finish: Any = finish, results: list[Any] = results) -> Any:
            results.extend([*(result.logprobs or {}).values(), *(result.prompt_logprobs or {}).values()])
            return finish(result)

        h.engine.finish = taking  # type: ignore[method-assign]
        h.submit("x", list(range(3, 40)), sampling=asking)
        h.run()
        found.append([np.frombuffer(r.chosen, np.float32) for r in results])
    assert len(found[0]) > 6
    for one, two in zip(*found, strict=True):
        assert np.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("quantizer", [int8, int4], ids=["int8", "int4"])
def test_quantized_weights_stay_close(quantizer: Any, folders: dict[str, Path]) -> None:
    """Lossy in its own way: a rank scales the activations that it sees, a part of what one rank sees."""
    folder, prompt = folders["wide heads"], [random.Random(3).randrange(3, 90) for _ in range(50)]
    one = {"quantizer": _make(quantizer, Context()), "parallel": Single()}
    two = thread_group(folder, 2, lambda ctx: {"quantizer": _make(quantizer, ctx)}, dtype="float32")
    exact, alone, together = (
        first_logits(h, prompt)
        for h in (
            harness(folder, dtype="float32"),
            TorchHarness(folder, Fcfs(FcfsConfig()), one, dtype="float32"),
            TorchHarness(folder, Fcfs(FcfsConfig()), {}, dtype="float32", executor=two),
        )
    )
    loss = [float(np.linalg.norm(found - exact) / np.linalg.norm(exact)) for found in (alone, together)]
    assert 0 < loss[1] < 1.5 * loss[0] < 0.5, loss
    assert not np.array_equal(alone, together)


def first_logits(h: TorchHarness, prompt: list[int]) -> Any:
    seen = []
    model = getattr(h.executor, "local", h.executor).model
    head = model.head

    def watched(hidden: Any) -> Any:
        seen.append(head(hidden))
        return seen[-1]

    model.head = watched
    h.submit("x", prompt, max_tokens=1)
    h.run()
    return seen[-1].numpy()[-1]


@pytest.mark.parametrize("kind", ["sampled", "trees"])
def test_ranks_draft_alike(kind: str, folders: dict[str, Path]) -> None:
    """Sampled drafts that are tested against their law, and trees: where ranks drew others, or moved other
    entries, texts would not be those of one rank."""
    spec = SpeculationSpec(verification="block" if kind == "sampled" else "invariant")
    made = EarlyExit if kind == "sampled" else Bushy

    def parts(ctx: Context) -> dict[str, Any]:
        config = EarlyExitConfig(layers=2, max_drafts=3, sampled=kind == "sampled")
        ctx.speculation = spec
        return {"quantizer": _make(no_quantizers, ctx), "speculator": made(config)}

    folder, texts, drafted = folders["3 kv heads"], [], []
    for world in (1, 2):
        if world == 1:
            ctx = Context(architecture=read_architecture(folder, 8, "float64", 256), dtype="float64")
            ctx.parts = {**parts(ctx), "parallel": Single()}
            executor: Any = load_executor(ctx)
        else:
            executor = thread_group(folder, world, parts)
        h = TorchHarness(folder, Fcfs(FcfsConfig(token_budget=64)), {}, executor=executor)
        texts.append(play(h, SAMPLED, together=True))
        drafted.append((h.engine.stats().drafted, h.engine.stats().accepted))
        h.engine.close()
        h.executor.close()
    assert texts[0] == texts[1] and drafted[0] == drafted[1]
    assert drafted[0][1] > 0
