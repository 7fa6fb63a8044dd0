"""Log-probabilities of prompts against transformers, whatever the engine does with the request."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bien.core.logprobs import TokenLogprobs
from bien.core.report import StepReport
from bien.core.request import SamplingParams
from bien.core.sampling.logprobs import SLICE
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from tests.core.executors.driver import Driver
from tests.core.executors.test_parity import llama
from tests.core.test_exactness import harness

TOP = 3
ASKING = SamplingParams(6, temperature=0.0, ignore_eos=True, seed=5, prompt_logprobs=TOP)
PLAIN = SamplingParams(6, temperature=0.0, ignore_eos=True, seed=5)
_RNG = random.Random(8)
PHRASE = [_RNG.randrange(3, 280) for _ in range(9)]
PROMPTS = [PHRASE * 4 + [_RNG.randrange(3, 280) for _ in range(n)] for n in (3, 21, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


def exact(folder: Path, prompt: list[int]) -> Any:
    """[P - 1, V]: what each of the tokens before the last says of the next."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1).numpy()


def check(found: TokenLogprobs, prompt: list[int], exact: Any, top: int = TOP) -> None:
    own = exact[np.arange(len(prompt) - 1), prompt[1:]]
    assert len(found) == len(prompt) - 1 and found.top == top
    np.testing.assert_allclose(np.frombuffer(found.chosen, "<f4"), own, atol=2e-5)
    ids = np.frombuffer(found.ids, "<u4").reshape(len(own), top)
    values = np.frombuffer(found.values, "<f4").reshape(len(own), top)
    order = np.argsort(-exact, axis=-1)[:, :top]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(exact, order, -1), atol=2e-5)
    np.testing.assert_array_equal(np.frombuffer(found.ranks, "<u4"), (exact > own[:, None]).sum(-1) + 1)


def watch(h: Any) -> dict[str, TokenLogprobs]:
    """What each request is told of its prompt, once and with its first token."""
    found: dict[str, TokenLogprobs] = {}
    take = h._take

    def noted(report: StepReport) -> None:
        for out in report.outputs:
            if out.prompt_logprobs is not None:
                assert out.id not in found and out.cached >= 0
                found[out.id] = out.prompt_logprobs
        take(report)

    h._take = noted
    return found


@pytest.mark.parametrize("way", [
    {},
    {"budget": 1},
    {"budget": 7, "depth": 2},
    {"budget": 13, "blocks": 18, "depth": 2},
    {"budget": 13, "blocks": 18, "depth": 2, "store": True},
    {"drafter": "prompt-lookup"},
    {"drafter": "early-exit"},
], ids=["alone", "token by token", "chunks", "preempted", "host tier", "lookup", "early exit"])  # fmt: skip
def test_of_whole_prompts(way: dict[str, Any], folder: Path) -> None:
    h = harness(folder, **way)
    found = watch(h)
    for i, prompt in enumerate(PROMPTS):
        h.submit(f"plain {i}", prompt, sampling=PLAIN)
    h.run()
    for i, prompt in enumerate(PROMPTS):
        h.submit(f"asking {i}", prompt, sampling=ASKING)
        h.submit(f"beside {i}", prompt, sampling=PLAIN)
    h.run()
    assert set(found) == {f"asking {i}" for i in range(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        check(found[f"asking {i}"], prompt, exact(folder, prompt))
        assert h.cached[f"asking {i}"] == 0, "what lies in a cache has no logits"
        assert h.tokens[f"asking {i}"] == h.tokens[f"plain {i}"] == h.tokens[f"beside {i}"]
    h.submit("after", PROMPTS[2], sampling=PLAIN)
    h.run()
    assert h.tokens["after"] == h.tokens["plain 2"], "the cache is none the worse for it"
    assert h.cached["after"] > 0
    h.engine.close()


def test_a_preempted_prompt_goes_on_from_what_is_known(folder: Path) -> None:
    """Preempted in the middle of its prompt and again behind it, with steps in flight."""
    h = harness(folder, budget=8, depth=2)
    found = watch(h)
    prompt = PROMPTS[2]
    h.submit("x", prompt, sampling=ASKING)
    starts: list[int] = []
    sequence = h.engine._sequences["x"]
    for _ in range(4):
        h.step()
    assert 0 < sequence.scored < len(prompt) - 1
    h.engine._admission.preempt(sequence)
    known = sequence.scored
    h.engine._scheduler.remove(sequence)
    h.engine._scheduler.add(sequence)
    while sequence.output_tokens < 2:
        h.step()
        starts.append(sequence.computed)
    assert h.cached["x"] == 0
    assert sequence.scored == len(prompt) - 1
    assert min(s for s in starts if s) >= known // 8 * 8, "its own blocks were used again"
    h.run()
    check(found["x"], prompt, exact(folder, prompt))
    reference = harness(folder)
    reference.submit("x", prompt, sampling=PLAIN)
    reference.run()
    assert h.tokens["x"] == reference.tokens["x"]


@pytest.mark.parametrize("top", [0, 1, 20])
def test_of_more_rows_than_a_slice(top: int, folder: Path) -> None:
    rng = random.Random(top)
    prompt = [rng.randrange(288) for _ in range(2 * SLICE + 7)]
    h = harness(folder)
    found = watch(h)
    h.submit("x", prompt, sampling=SamplingParams(1, prompt_logprobs=top))
    h.submit("one token", prompt[:1], sampling=ASKING)
    h.run()
    check(found["x"], prompt, exact(folder, prompt), top)
    assert "one token" not in found, "there is nothing before it"


def test_recurrent_states_are_computed_again_too(tmp_path: Path) -> None:
    folder, told, prompt = write_tiny_hybrid(tmp_path), [], [t % 90 for t in PHRASE * 5]
    for way in ({}, {"budget": 9, "depth": 2}):
        h = harness(folder, **way)
        found = watch(h)
        h.submit("plain", prompt, sampling=PLAIN)
        h.run()
        h.submit("asking", prompt, sampling=ASKING)
        h.run()
        assert h.cached["asking"] == 0
        assert h.tokens["asking"] == h.tokens["plain"]
        told.append(np.frombuffer(found["asking"].chosen, "<f4"))
    np.testing.assert_allclose(told[0], told[1], atol=1e-5)


def test_a_slot_forgets_who_had_it(folder: Path) -> None:
    driver = Driver(folder)
    first = driver.add(PHRASE, sampling=ASKING)
    driver.step({first: 9})
    driver.release(first)
    second = driver.add(PHRASE)
    assert second == first
    driver.step({second: 9})
    assert driver.executor.slots.prompt_logprobs == {}


def test_parts_of_a_run_join_to_it() -> None:
    from bien.core.sampling.logprobs import token_logprobs

    logits = torch.arange(30, dtype=torch.float64).reshape(6, 5).sin()
    tokens = np.array([3, 1, 4, 1, 0, 2], np.int32)
    whole = token_logprobs(logits, tokens, 2, ranks=True)
    for n in range(7):
        assert whole.behind(n) == token_logprobs(logits[n:], tokens[n:], 2, ranks=True)
        assert TokenLogprobs.joined([whole.first(n), whole.behind(n)]) == whole
