"""Block drafters in an engine: the text is the target's own, and so is what the cache gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file

from bien.core.api import Context, SamplingParams, SpeculationSpec
from bien.core.architectures.registry import read_architecture
from bien.core.executors.make import make_executor
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import write_toy
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from tests.core.parallel.thread_group import thread_group
from tests.plugins.speculators.block_folders import (
    FULL,
    SLIDING,
    TARGET_LAYERS,
    deep_spec,
    second,
    write_drafter,
    z_lab,
)
from tests.plugins.speculators.test_dflash import build

SPOKEN = [40, 90, 111, 130, 200, 210]  # what the target mostly says: random drafts are often right
DRAFTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": (
        "dflash",
        {**z_lab(), "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 11},
        {"sampled": False},
    ),
    "dflash 2": ("dflash", second(), {}),
    "dspark": ("dspark", deep_spec(), {"max_drafts": 4}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_toy(folder, num_hidden_layers=TARGET_LAYERS, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    said = torch.zeros(288, 1)
    said[SPOKEN] = 12
    tensors["lm_head.weight"] *= said
    save_file(tensors, folder / "model.safetensors")
    return folder


def told(folder: Path) -> Path:
    """What comes before a draft changes it, but not to what the target never says."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("markov_head.markov_w2.weight", "candidate_selector.successor_codebook"):
        if name in tensors:
            kept = tensors[name][SPOKEN]
            tensors[name] = torch.zeros_like(tensors[name])
            tensors[name][SPOKEN] = kept
    save_file(tensors, folder / "model.safetensors")
    return folder


def engine(
    target: Path, drafter: Any, spec: SpeculationSpec | None = None, budget: int = 512, **options: Any
) -> TorchHarness:
    parts = {"quantizer": NoQuantizer(), "parallel": Single(), "speculator": drafter}
    context = Context(architecture=read_architecture(target, 8, "float64", 256), dtype="float64", parts=parts)
    context.speculation = spec or SpeculationSpec()
    executor = options.pop("executor", None) or make_executor(context)
    return TorchHarness(target, Fcfs(FcfsConfig(token_budget=budget)), parts, executor=executor, **options)


def turns(h: TorchHarness, temperature: float) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Three prompts at once, then a second turn of each over its cached prefix."""

    def sampling(tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)

    rng = random.Random(1)
    prompts = [[rng.randrange(3, 259) for _ in range(n)] for n in (41, 6, 27)]
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, sampling=sampling(17 + i, i))
    h.run()
    first = {id: list(tokens) for id, tokens in h.tokens.items()}
    for i, prompt in enumerate(prompts):
        h.submit(f"s{i}", prompt + first[f"r{i}"] + [7, 8, 9], sampling=sampling(12, 20 + i))
    h.run()
    return h.tokens, h.cached


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    """What engines without a drafter gave."""
    return {}


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_and_cached_tokens_are_those_without_drafts(
    name: str, tmp_path: Path, target: Path, alone: dict[Any, Any]
) -> None:
    kind, config, parameters = DRAFTERS[name]
    folder = told(write_drafter(tmp_path, config))
    gumbel = SpeculationSpec(noise="gumbel")
    for spec, temperature, budget, blocks in (
        (SpeculationSpec(), 0.0, 512, 64),
        (gumbel, 1.0, 19, 64),
        (SpeculationSpec(), 1.0, 512, 13),
    ):
        key = (spec.noise, temperature, budget, blocks)
        if key not in alone:
            alone[key] = turns(engine(target, None, spec, budget, blocks=blocks), temperature)
        plain = alone[key]
        h = engine(target, build(kind, folder, **parameters), spec, budget, blocks=blocks)
        found = turns(h, temperature)
        stats = h.engine.stats()
        assert found[0] == plain[0], f"at temperature {temperature}, {blocks} blocks"
        assert stats.drafted > stats.accepted > 4
        if blocks == 64:  # preemptions come at other times with drafts
            assert found[1] == plain[1]
            assert max(found[1].values()) > 40
        else:
            assert stats.preemptions > 0


def test_text_is_that_of_one_rank(tmp_path: Path, target: Path) -> None:
    """A drafter is whole on each rank of a model; what it reads of the target is gathered."""
    copies = {"embed_tokens.weight": load_numpy(target / "model.safetensors")["model.embed_tokens.weight"]}
    folder = told(write_drafter(tmp_path, deep_spec(), **copies))

    def parts(ctx: Context) -> dict[str, Any]:
        return {"quantizer": NoQuantizer(), "speculator": build("dspark", folder)}

    found = []
    for group in (None, thread_group(target, 2, parts)):
        h = engine(target, build("dspark", folder), executor=group)
        found.append((turns(h, 1.0), h.engine.stats().accepted))
        h.executor.close()
    assert found[0] == found[1]
    assert found[0][1] > 4
