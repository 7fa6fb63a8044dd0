"""Drafters with a network in an engine: the text is the target's own, and so is what the cache gives."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bien.core.api import Context, GenerateRequest, SamplingParams, SpeculationSpec, TokenIds
from bien.core.architectures.registry import read_architecture
from bien.core.build import build
from bien.core.compose import compose
from bien.core.deployment import Deployment, ModelSpec, PoolSpec, Selection
from bien.core.executors.make import make_executor
from bien.core.plugins import PluginManager
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import toy_config, write_toy
from bien.plugins.kv_stores import host
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.speculators import draft_model, eagle3, mtp
from tests.core.executors.latent_models import INDEXER, SHAPE
from tests.core.parallel.thread_group import thread_group
from tests.plugins.speculators.folders import eagle3_config, eagle3_tensors, write, write_predicting

SPOKEN = [40, 90, 111]  # what the targets mostly say: random drafts are often right
DRAFTERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "eagle3": ("llama", eagle3, {"max_drafts": 3}),
    "eagle3 sampled": ("llama", eagle3, {"max_drafts": 3, "sampled": True}),
    "eagle3 tree": ("llama", eagle3, {"max_drafts": 6, "topology": "tree", "depth": 3, "top_k": 3}),
    "eagle3 wide": ("llama", eagle3, {"max_drafts": 12, "topology": "tree", "depth": 2, "top_k": 3}),
    "mtp": ("glm4_moe", mtp, {"max_drafts": 3}),
    "mtp of latents": ("glm_moe_dsa", mtp, {"max_drafts": 2, "sampled": True}),
    "draft-model": ("llama", draft_model, {"max_drafts": 3}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home, made = tmp_path_factory.mktemp("models"), {}
    made["llama"] = write_toy(home / "llama", num_hidden_layers=6, tie_word_embeddings=False)
    made["small"] = write_toy(home / "small", num_hidden_layers=6, tie_word_embeddings=False)
    made["glm4_moe"] = write_predicting(home / "glm", toy_config("glm4_moe", num_hidden_layers=2))
    latent = {"model_type": "glm_moe_dsa", "hidden_act": "silu", "num_nextn_predict_layers": 2}
    made["glm_moe_dsa"] = write_predicting(
        home / "latent", {**latent, **SHAPE, **INDEXER, "num_hidden_layers": 2}
    )
    for name, folder in made.items():
        tensors = load_file(folder / "model.safetensors")
        if name == "small":  # the target, a little spoilt
            torch.manual_seed(0)
            tensors = {n: t + 0.1 * t.std() * torch.randn_like(t) for n, t in tensors.items()}
        said = torch.zeros(288, 1)
        said[SPOKEN] = 6
        head = tensors["lm_head.weight"]
        head *= said
        head[SPOKEN[2]] = -head[SPOKEN[0]] - head[SPOKEN[1]]  # one of them is always above zero
        save_file(tensors, folder / "model.safetensors")
    config = eagle3_config("safeailab", draft_vocab_size=len(SPOKEN))
    tensors = eagle3_tensors("safeailab", config)
    tensors["d2t"] = torch.tensor(SPOKEN) - torch.arange(len(SPOKEN))
    tensors["t2d"] = torch.zeros(288, dtype=torch.bool)
    tensors["t2d"][SPOKEN] = True
    made["eagle3"] = write(home / "eagle3", config, tensors)
    return made


def make(folders: dict[str, Path], name: str, ctx: Context) -> Any:
    _, module, parameters = DRAFTERS[name]
    (provider,) = module.bien_providers()
    own = {eagle3: {"path": str(folders["eagle3"])}, draft_model: {"model": str(folders["small"])}}
    return provider.factory(provider.config_type(**parameters, **own.get(module, {})), ctx)


def harness(
    folders: dict[str, Path],
    name: str,
    drafts: bool = True,
    budget: int = 512,
    spec: SpeculationSpec | None = None,
    **options: Any,
) -> TorchHarness:
    folder, drafter = folders[DRAFTERS[name][0]], None
    architecture = read_architecture(folder, 8, "float64", 256)
    if drafts:
        drafter = make(folders, name, Context(architecture=architecture))
    parts = {"quantizer": NoQuantizer(), "parallel": Single(), "speculator": drafter}
    context = Context(architecture=architecture, dtype="float64", parts=parts)
    context.speculation = spec or SpeculationSpec()
    executor = make_executor(context)
    scheduler = Fcfs(FcfsConfig(token_budget=budget))
    return TorchHarness(folder, scheduler, parts, executor=executor, **options)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def turns(h: TorchHarness, temperature: float) -> Found:
    """Three prompts at once, then a second turn of each over its cached prefix."""

    def sampling(tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)

    for i, n in enumerate((41, 6, 27)):
        h.submit(f"r{i}", text(i, n), sampling=sampling(17 + i, i))
    h.run()
    first = {id: list(tokens) for id, tokens in h.tokens.items()}
    for i, n in enumerate((41, 6, 27)):
        h.submit(f"s{i}", text(i, n) + first[f"r{i}"] + text(9, 5), sampling=sampling(12, 20 + i))
    h.run()
    return h.tokens, h.cached


Found = tuple[dict[str, list[int]], dict[str, int]]
_plain: dict[tuple[Any, ...], Found] = {}  # what targets say without drafts


def plain(folders: dict[str, Path], name: str, temperature: float, budget: int, blocks: int) -> Found:
    key = (DRAFTERS[name][0], temperature, budget, blocks)
    if key not in _plain:
        _plain[key] = turns(harness(folders, name, False, budget, blocks=blocks), temperature)
    return _plain[key]


def some(names: Iterable[str], *fast: str) -> list[Any]:
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", some(DRAFTERS, "eagle3 tree", "mtp"))
def test_text_and_cached_tokens_are_those_without_drafts(folders: dict[str, Path], name: str) -> None:
    for temperature, budget, blocks in ((0.0, 19, 64), (1.0, 512, 64), (1.0, 512, 13)):
        h = harness(folders, name, True, budget, blocks=blocks)
        found, want = turns(h, temperature), plain(folders, name, temperature, budget, blocks)
        stats = h.engine.stats()
        assert found[0] == want[0], f"at temperature {temperature}, {blocks} blocks"
        assert stats.drafted > stats.accepted > 5
        if blocks == 64:  # preemptions come at other times with drafts
            assert found[1] == want[1]
            assert max(found[1].values()) > 40
        else:
            assert stats.preemptions > 0


@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize(
    "name", some(("eagle3 sampled", "mtp of latents", "draft-model", "eagle3 tree"), "eagle3 sampled")
)
def test_drafts_are_tested_against_their_law(folders: dict[str, Path], name: str, verification: Any) -> None:
    spec = SpeculationSpec(verification=verification)
    h = harness(folders, name, spec=spec)
    found, cached = turns(h, 1.0)
    assert {len(found[f"r{i}"]) - 17 - i for i in range(3)} == {0}
    assert {t for tokens in found.values() for t in tokens} <= set(range(288))
    assert max(cached.values()) > 40
    stats = h.engine.stats()
    assert stats.drafted > stats.accepted > 5


def test_a_model_drafts_all_of_its_own_text(folders: dict[str, Path]) -> None:
    """The target as its own drafter: every draft is taken, greedy or drawn with shared noise."""
    folders = {**folders, "small": folders["llama"]}
    for temperature in (0.0, 1.0):
        h = harness(folders, "draft-model")
        turns(h, temperature)
        stats = h.engine.stats()
        assert stats.accepted == stats.drafted > 50


@pytest.mark.parametrize("name", some(("eagle3", "mtp", "draft-model"), "mtp"))
def test_two_ranks_say_what_one_says(folders: dict[str, Path], name: str) -> None:
    def parts(ctx: Context) -> dict[str, Any]:
        return {"quantizer": NoQuantizer(), "speculator": make(folders, name, ctx)}

    folder = folders[DRAFTERS[name][0]]
    h = TorchHarness(folder, Fcfs(FcfsConfig(token_budget=19)), {}, executor=thread_group(folder, 2, parts))
    assert turns(h, 0.0) == plain(folders, name, 0.0, 19, 64)
    assert h.engine.stats().accepted > 5
    h.engine.close()
    h.executor.close()


@pytest.mark.parametrize("name", some(("eagle3", "mtp of latents"), "eagle3"))
def test_what_lay_in_host_memory_is_whole(folders: dict[str, Path], name: str) -> None:
    """Blocks come back with the drafter's entries and states: it drafts as if they had never left."""
    accepted = []
    for blocks in (64, 13):
        h = harness(folders, name, True, 512, blocks=blocks)
        (provider,) = host.bien_providers()
        context = Context(groups=h.groups, io=h.executor.io)
        h.use_store(provider.factory(provider.config_type(capacity_bytes=1 << 24), context))
        prompt = text(3, 60)
        for i in range(3):
            h.submit(f"a{i}", prompt, max_tokens=9)
            h.run()
            h.submit(f"b{i}", text(50 + i, 80), max_tokens=2)  # takes the blocks
            h.run()
        assert h.tokens["a0"] == h.tokens["a1"] == h.tokens["a2"]
        assert h.cached["a2"] == 56
        accepted.append(h.engine.stats().accepted)
        h.engine.close()
    assert accepted[0] == accepted[1]


def test_a_tree_of_all_that_is_said_is_walked(folders: dict[str, Path]) -> None:
    """Two levels of every token that the target says: each round takes two drafts, wherever they lie in the
    tree; what the drafter absorbs of a path is as if it had been a chain."""
    said = []
    for drafts in (False, True):
        h = harness(folders, "eagle3 wide", drafts)
        for i, n in enumerate((41, 6, 27)):
            h.submit(f"r{i}", text(i, n), max_tokens=60)
        h.run()
        said.append(h.tokens)
    assert said[0] == said[1]
    assert {t for tokens in said[1].values() for t in tokens} <= set(SPOKEN)
    counts = h.engine.stats().drafts.sources["drafter"]
    assert counts.accepted_at[0] >= 0.8 * counts.rounds > 30  # but where few tokens are left
    assert counts.accepted_at[1] >= 0.8 * counts.drafted_at[1]


def test_a_deployment_selects_them(folders: dict[str, Path]) -> None:
    """Parameters are decoded, memory is counted, and drafts that are unlikely are not verified."""
    manager = PluginManager.load("")
    drafted, said = [], []
    options = SpeculationSpec(length="confidence", min_chance=0.9)
    parameters = {"path": str(folders["eagle3"]), "max_drafts": 6, "topology": "tree"}
    for spec in (
        {},
        {"speculator": Selection("eagle3", parameters)},
        {"speculator": Selection("eagle3", parameters), "speculation": options},
    ):
        pool = PoolSpec(kv_tokens=512, slots=3, **spec)  # type: ignore[arg-type]
        model = ModelSpec(str(folders["llama"]), max_context=256)
        worker = build(compose(Deployment(model, pool=(pool,)), manager).pools[0], id="w", generation="g")
        sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        worker.engine.submit(GenerateRequest("r", TokenIds.of(text(7, 20)), sampling))
        said.append(b"")
        while worker.engine.busy:
            plan = worker.engine.begin()
            assert plan is not None
            result = worker.executor.sample(worker.executor.forward(plan)).result()
            said[-1] += b"".join(o.tokens for o in worker.engine.finish(result).outputs)
        drafted.append(worker.engine.stats().drafted)
        assert worker.info.group_kinds == (("full", "draft", "draft") if spec else ("full",))
        worker.close()
    assert said[0] == said[1] == said[2]
    assert drafted[0] == 0
    assert 0 < drafted[2] < drafted[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_random_traffic(folders: dict[str, Path], name: str) -> None:
    """Chunks, shared prefixes, preemptions, steps in flight, requests without drafts, penalties."""
    for seed in range(8):
        rng, said = random.Random(seed), []
        budget, blocks = rng.choice([9, 19, 64, 512]), rng.choice([12, 14, 20, 64])
        options = {"blocks": blocks, "slots": rng.choice([1, 2, 4]), "depth": rng.choice([1, 2])}
        requests = []
        for i in range(rng.randint(2, 7)):
            prompt = text(seed, 60)[: rng.randint(1, 55)] + text(100 + i, rng.randint(0, 10))
            sampling = SamplingParams(
                max_tokens=rng.randint(1, 25),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([0.9, 1.0]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                seed=i,
                ignore_eos=True,
                speculate=rng.random() < 0.85,
            )
            requests.append((prompt, sampling, rng.randint(0, 6)))
        for drafts in (False, True):
            h = harness(folders, name, drafts, budget, **options)
            for i, (prompt, sampling, steps) in enumerate(requests):
                h.submit(f"r{i}", prompt, sampling=sampling)
                for _ in range(steps):
                    h.step()
            h.run()
            said.append(h.tokens)
        assert said[0] == said[1], f"seed {seed}"
