"""Logits of the torch executor against transformers, over every way in which tokens can be batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bien.core.testing.toy import write_toy
from tests.core.executors.driver import Driver
from tests.core.executors.latent_models import LATENT

Logits = np.ndarray[Any, Any]
VOCAB = 288


def llama(folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(folder, LlamaForCausalLM, LlamaConfig, **changes)


def qwen3(folder: Path, **changes: Any) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(folder, Qwen3ForCausalLM, Qwen3Config, head_dim=12, **changes)


def qwen3_moe(folder: Path, **changes: Any) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    return _save(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig, **{**shape, **changes})


def glm4_moe(folder: Path, **changes: Any) -> Path:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    shape = {
        "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.34},
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "use_qk_norm": True,
    }
    return _save(folder, Glm4MoeForCausalLM, Glm4MoeConfig, **{**shape, **changes})


def gpt_oss(folder: Path, **changes: Any) -> Path:
    from transformers import GptOssConfig, GptOssForCausalLM

    yarn = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 0.9,
        "truncate": False,
        "original_max_position_embeddings": 400,
    }
    shape = {
        "head_dim": 12,
        "rope_parameters": yarn,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 1.1,
    }
    return _save(folder, GptOssForCausalLM, GptOssConfig, **{**shape, **changes})


def _save(folder: Path, model: Any, config: Any, **changes: Any) -> Path:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rms_norm_eps": 3e-3,
    }
    made = model(config(**{**shape, **changes}))
    for name, tensor in made.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(tensor, 1.0, 0.1)
        elif "bias" in name:
            torch.nn.init.normal_(tensor, 0.0, 0.3)
        elif "sinks" in name:
            torch.nn.init.normal_(tensor, 2.0, 2.0)
    for name, tensor in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    made.save_pretrained(folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": llama,
    "qwen3": qwen3,
    "llama-tied": lambda f: llama(f, tie_word_embeddings=True),
    "llama-biased": lambda f: llama(f, attention_bias=True, mlp_bias=True),
    "llama-mha": lambda f: llama(f, num_key_value_heads=6),
    "llama3-rope": lambda f: llama(
        f,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen3-window": lambda f: qwen3(
        f,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "qwen3-moe": lambda f: qwen3_moe(f, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-moe-sparse-step": lambda f: qwen3_moe(f, decoder_sparse_step=2, attention_bias=True),
    "glm4-moe": glm4_moe,
    "glm4-moe-plain": lambda f: glm4_moe(
        f,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        use_qk_norm=False,
        attention_bias=False,
        n_group=1,
        topk_group=1,
    ),
    **LATENT,
    "gpt-oss": gpt_oss,
    "toy-llama": lambda f: write_toy(f),
    "toy-qwen3": lambda f: write_toy(f, "qwen3"),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp(request.param))


class Reference:
    """transformers' logits after every position, with the text computed at once."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.known: dict[tuple[int, ...], Logits] = {}

    def after(self, tokens: list[int]) -> Logits:
        """[V] after the last token."""
        with torch.inference_mode():
            out = self.model(torch.tensor([tokens])).logits[0, -1]
        return np.asarray(out.double())


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def near(found: Logits, exact: Logits) -> None:
    assert found.shape == exact.shape
    worst = np.abs(found - exact).max() / np.abs(exact).max()
    assert worst <= 1e-4, worst


def check(driver: Driver, reference: Reference) -> None:
    """Every logit row of the last step: row j of a slot comes after all but the last tokens of its text."""
    assert driver.logits
    for slot, rows in driver.logits.items():
        known = driver.content[slot]
        near(rows[0], reference.after(known[:-1]) if len(rows) == 1 else reference.after(known[: -len(rows)]))


def test_prefill_and_decode(folder: Path, reference: Reference) -> None:
    driver = Driver(folder)
    slot = driver.add(text(1, 43))
    driver.step({slot: 43})
    check(driver, reference)
    for _ in range(12):
        driver.step({slot: 1})
        check(driver, reference)


@pytest.mark.parametrize("shuffle", [None, 3])
def test_chunked_prefill(folder: Path, reference: Reference, shuffle: int | None) -> None:
    driver = Driver(folder, shuffle=shuffle)
    slot = driver.add(text(2, 70))
    for chunk in (5, 20, 1, 1, 30):
        driver.step({slot: chunk})
        assert not driver.logits
    driver.step({slot: 13})
    check(driver, reference)


@pytest.mark.parametrize("shuffle", [None, 4])
def test_ragged_mix_of_prefill_and_decode(folder: Path, reference: Reference, shuffle: int | None) -> None:
    driver = Driver(folder, shuffle=shuffle)
    a, b = driver.add(text(3, 50)), driver.add(text(4, 3))
    driver.step({a: 50, b: 3})
    check(driver, reference)
    c, d = driver.add(text(5, 37)), driver.add(text(6, 9))
    driver.step({b: 1, c: 20, a: 1, d: 9})
    check(driver, reference)
    driver.step({d: 1, c: 17, b: 1, a: 1})
    check(driver, reference)
    for _ in range(9):
        driver.step({a: 1, b: 1, c: 1, d: 1})
        check(driver, reference)


def test_prefix_hit(folder: Path, reference: Reference) -> None:
    driver = Driver(folder)
    shared = text(7, 40)
    a = driver.add(shared + text(8, 5))
    driver.step({a: 45})
    b = driver.add(shared + text(9, 11), like=(a, 5))
    driver.step({a: 1, b: 11})
    check(driver, reference)
    driver.step({a: 1, b: 1})
    check(driver, reference)


def test_preempted(folder: Path, reference: Reference) -> None:
    driver = Driver(folder, slots=2)
    prompt = text(10, 30)
    a, b = driver.add(prompt), driver.add(text(11, 20))
    driver.step({a: 30, b: 20})
    driver.step({a: 1, b: 1})
    known = driver.release(a)
    driver.step({b: 1})
    again = driver.add(known, prompt=len(prompt))
    driver.step({again: len(known), b: 1})
    check(driver, reference)
    driver.step({again: 1, b: 1})
    check(driver, reference)


def test_rows_with_drafts(folder: Path, reference: Reference) -> None:
    """Wrong and right drafts in one batch with a plain row and a chunk; rejected entries are overwritten."""
    driver = Driver(folder, shuffle=5)
    a, b, c, d = (driver.add(text(12 + i, 25 + 6 * i)) for i in range(4))
    driver.step({a: 25, b: 31, c: 37})
    probe = Driver(folder)
    slot = probe.add(list(driver.content[a]))
    ahead = probe.generate(slot, 3)
    before = {s: list(driver.content[s]) for s in (a, b, c)}
    wrong = (ahead[1] + 1) % VOCAB
    gained = driver.step({a: 1, b: 1, c: 1, d: 12}, {a: [ahead[0], wrong, 9], b: [1, 2, 3]})
    assert gained[a] == ahead[:2] and len(gained[c]) == 1 and not gained[d]
    for j in range(4):
        near(driver.logits[a][j], reference.after(before[a] + [ahead[0], wrong, 9][:j]))
        near(driver.logits[b][j], reference.after(before[b] + [1, 2, 3][:j]))
    near(driver.logits[c][0], reference.after(before[c]))
    for _ in range(3):
        driver.step({a: 1, b: 1, c: 1})
        check(driver, reference)


def test_long_contexts_in_one_batch(folder: Path, reference: Reference) -> None:
    """Rows of very different length: in place, and gathered in several buckets."""
    driver = Driver(folder, blocks=400, block_tokens=4, max_context=500)
    lengths = (460, 7, 380, 12, 90, 100)
    slots = [driver.add(text(20 + i, n)) for i, n in enumerate(lengths)]
    driver.step(dict(zip(slots, lengths, strict=True)))
    check(driver, reference)
    for _ in range(2):
        driver.step(dict.fromkeys(slots, 1))
        check(driver, reference)
