"""DeepSeek-V3 and V3.2, GLM-5, Kimi K2: what is counted, read, refused and chosen, what keeps its bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from bien.core.architectures.base import Architecture
from bien.core.architectures.builtin import config as known_config
from bien.core.architectures.registry import read_architecture
from bien.core.errors import ModelError, UserError
from bien.core.kv.groups import GroupKind
from bien.plugins.parallel.tensor import TensorParallel
from tests.core.executors.driver import Driver
from tests.core.executors.latent_models import INDEXER, LATENT, SHAPE, draw
from tests.plugins.test_kernels import native_kernels

THREE = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], **INDEXER}
BILLION = 10**9


def read(folder: Path, name: str, **changes: Any) -> Architecture:
    """A known config with fields replaced, or taken away (None)."""
    config = {**known_config(name), **changes}
    for field, value in changes.items():
        if value is None:
            del config[field]
    (folder / "config.json").write_text(json.dumps(config))
    return read_architecture(folder, 64, "bfloat16")


@pytest.mark.parametrize(
    ("name", "total", "active", "kv", "linear", "attention"),
    [
        ("deepseek-v3", 671.03, 37.55, 70_272, 73.25, 17.0e6 * 100_000),
        ("deepseek-v3.2", 671.88, 38.40, 85_888, 74.95, 34.8e9 + 999_424 * 100_000),
        ("kimi-k2", 1026.41, 32.86, 70_272, 63.37, 8.5e6 * 100_000),
        ("glm-5.1", 743.91, 41.78, 109_824, 81.66, 1735.2e7 + 4.85e9 + 638_976 * 100_000),
        ("glm-5.3", 743.38, 41.25, 95_232, 80.60, 1735.2e7 + 4.85e9 + 172_032 * 100_000),
    ],
)
def test_counts(name: str, total: float, active: float, kv: int, linear: float, attention: float) -> None:
    a = read_architecture(name, 64, "bfloat16")
    assert round(a.parameters / BILLION, 2) == total
    assert round(a.active_parameters / BILLION, 2) == active
    assert sum(g.bytes_per_token for g in a.groups) == kv
    assert not any(g.shardable for g in a.groups)
    assert round(a.flops(0) / BILLION, 2) == linear
    assert abs(a.flops(100_000) - a.flops(0) - attention) < 0.003 * attention


def test_glm_weighs_what_its_publisher_says() -> None:
    """Bytes of the BF16 checkpoint's tensors, as its index tells them; balancing biases are float32."""
    a = read_architecture("glm-5.3", 64, "bfloat16")
    stored = [w for w in a.weights if not w.spare]
    wide = sum(w.size for w in stored if w.name.endswith("e_score_correction_bias"))
    assert 2 * sum(w.size * w.copies for w in stored) + 2 * wide == 1_506_659_919_872


def test_layers_that_choose(tmp_path: Path) -> None:
    def full(**changes: Any) -> tuple[int, ...]:
        groups = read(tmp_path, "glm-5.3", **changes).groups
        assert [(g.name, g.kind) for g in groups] == [
            ("latent", GroupKind.LATENT),
            ("indexer", GroupKind.INDEXER),
        ]
        assert groups[0].layers == tuple(range(78))
        return groups[1].layers

    assert full() == (0, 1, *range(2, 78, 4))
    assert full(index_topk_freq=None, index_skip_topk_offset=None) == tuple(range(78))
    pattern = "FSSF" + "S" * 74
    assert full(index_topk_pattern=pattern) == (0, 3)
    types = ["full", *["shared"] * 77]
    assert full(indexer_types=types, index_topk_pattern=pattern) == (0,)
    a = read(tmp_path, "glm-5.3", mlp_layer_types=None, first_k_dense_replace=5)
    assert a.config["mlp_layer_types"] == ["dense"] * 5 + ["sparse"] * 74
    assert read_architecture("deepseek-v3", 64, "bfloat16").groups[1:] == ()


@pytest.mark.parametrize(
    ("name", "field"),
    [("glm-5.3", f) for f in (
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group",
        "norm_topk_prob", "routed_scaling_factor", "moe_intermediate_size", "intermediate_size",
        "index_n_heads", "index_head_dim", "index_topk", "index_skip_topk_offset", "rms_norm_eps",
        "tie_word_embeddings", "vocab_size", "max_position_embeddings", "num_attention_heads",
    )]
    + [("deepseek-v3", f) for f in ("q_lora_rank", "first_k_dense_replace", "rope_theta")],
)  # fmt: skip
def test_a_missing_deciding_field_is_named(name: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"lacks '{field}'"):
        read(tmp_path, name, **{field: None})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"moe_layer_freq": 2, "mlp_layer_types": None}, "moe_layer_freq = 2"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"index_head_dim": 32}, "index_head_dim = 32 is less than the qk_rope_head_dim = 64"),
        ({"kv_lora_rank": 511}, "kv_lora_rank = 511 is odd"),
        ({"n_group": 128, "topk_group": 3}, "num_experts_per_tok = 8, but .* have 6 experts"),
        ({"indexer_types": ["shared"] * 78}, "layer 0 shares a choice"),
        ({"indexer_types": ["full"] * 77}, "indexer_types = .*; needs one of"),
        ({"indexer_types": ["full", "half"] * 39}, "indexer_types = 'half'"),
        ({"index_topk_pattern": "FX" * 39}, "indexer_types = 'X'"),
        ({"mlp_layer_types": ["wide"] * 78}, "mlp_layer_types = 'wide'"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=match):
        read(tmp_path, "glm-5.3", **changes)


def test_several_devices_are_refused() -> None:
    """Until the layers can be cut."""
    for name in ("deepseek-v3", "glm-5.3"):
        strategy = TensorParallel(read_architecture(name, 64, "bfloat16"))
        assert strategy.mesh(1).world == 1
        with pytest.raises(UserError, match="cannot cut models of architecture"):
            strategy.mesh(2)


def change(folder: Path, **tensors: Any) -> Path:
    """Replace tensors whose names end so ("_" for ".")."""
    held = load_file(folder / "model.safetensors")
    for end, value in tensors.items():
        names = [n for n in held if n.replace(".", "_").endswith(end)]
        assert names, end
        for name in names:
            held[name] = value(held[name]) if callable(value) else np.full_like(held[name], value)
    save_file(held, folder / "model.safetensors")
    return folder


def last_logits(folder: Path, tokens: list[int], chunk: int = 64, **parts: Any) -> Any:
    driver = Driver(folder, **parts)
    slot, at = driver.add(tokens), 0
    while at < len(tokens):
        driver.step({slot: min(chunk, len(tokens) - at)})
        at += chunk
    return driver.logits[slot][0]


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 280, length).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_of_equal_scores_the_lowest_positions_are_chosen(chunk: int, tmp_path: Path) -> None:
    """Every score is zero: the last token sees the first nine positions and no other, its own neither."""
    folder = draw(tmp_path, "glm_moe_dsa", **INDEXER, num_hidden_layers=1)
    change(folder, indexer_wq_b_weight=0.0)
    tokens = tokens_of(1, 30)
    want = last_logits(folder, tokens)
    for at in (0, 5, 8, 9, 10, 20, 28):
        other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
        same = np.abs(last_logits(folder, other, chunk) - want).max() < 1e-5 * np.abs(want).max()
        assert same == (at >= INDEXER["index_topk"]), at


def test_shared_layers_see_what_the_last_full_one_chose(tmp_path: Path) -> None:
    """Layer 1 shares: its choice follows layer 0's indexer, and it has no keys of its own."""
    folder = draw(tmp_path, "glm_moe_dsa", **THREE)
    a = read_architecture(folder, 8, "float32")
    assert a.groups[1].layers == (0, 2)
    assert not [w.name for w in a.weights if w.name.startswith("model.layers.1.self_attn.indexer")]


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm_moe_dsa"])
def test_half_precision_is_near(kind: str, tmp_path: Path) -> None:
    """Where nothing is chosen that rounding could turn: every expert and position is taken."""
    choosing = INDEXER | {"index_topk": 64} if kind == "glm_moe_dsa" else {}
    folder = draw(tmp_path, kind, **choosing, num_experts_per_tok=12, topk_group=4)
    tokens = tokens_of(1, 50)
    full, half = last_logits(folder, tokens), last_logits(folder, tokens, dtype="bfloat16")
    assert np.linalg.norm(half - full) / np.linalg.norm(full) < 0.15


def test_what_decides_keeps_its_bits(tmp_path: Path) -> None:
    """Balancing biases far from zero differ by less than 16 bits tell."""
    folder = draw(tmp_path, "glm_moe_dsa", **INDEXER)
    rng = np.random.default_rng(1)
    change(folder, e_score_correction_bias=lambda t: (30 + 0.05 * rng.normal(size=t.shape)).astype(t.dtype))
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    chosen = []
    for dtype in ("float32", "bfloat16"):
        layer = Driver(folder, dtype=dtype).executor.model.layers[2]
        chosen.append(layer.feed_forward.router(x.to(getattr(torch, dtype)))[0])
        assert layer.mixer.indexer.weights.dtype is torch.float32
    assert torch.equal(*chosen)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5"])
def test_native_kernels_fall_back_to_torch(name: str, tmp_path: Path) -> None:
    kernels = native_kernels()
    folder = LATENT[name](tmp_path)
    tokens = tokens_of(3, 50)
    want, found = last_logits(folder, tokens), last_logits(folder, tokens, 9, kernels=kernels)
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


def test_the_text_model_of_one_that_sees(tmp_path: Path) -> None:
    """Kimi K2.5: nested config, a prefix of names, and a tower for pictures that is left alone."""
    plain = draw(tmp_path / "plain", "kimi_k2")
    seeing = tmp_path / "seeing"
    seeing.mkdir()
    tensors = {f"language_model.{n}": t for n, t in load_file(plain / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.w": np.zeros((2, 2), np.float32)}, seeing / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    config = {"model_type": "kimi_k25", "eos_token_id": 7, "text_config": text, "vision_config": {"depth": 3}}
    del text["eos_token_id"]
    (seeing / "config.json").write_text(json.dumps(config))
    a = read_architecture(seeing, 8, "float32")
    assert (a.name, a.eos_token_ids, a.vocab_size) == ("kimi_k25", (7,), SHAPE["vocab_size"])
    tokens = tokens_of(4, 20)
    np.testing.assert_array_equal(last_logits(seeing, tokens), last_logits(plain, tokens))
    (seeing / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(last_logits(seeing, tokens), last_logits(plain, tokens))
    del config["text_config"]
    (seeing / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks 'text_config'"):
        read_architecture(seeing, 8, "float32")


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5"])
def test_filling_writes_what_attending_does(name: str, tmp_path: Path) -> None:
    driver = Driver(LATENT[name](tmp_path))
    layer = driver.executor.model.layers[0]
    slot = driver.add(tokens_of(5, 20))
    seen: list[torch.Tensor] = []
    call = type(layer).__call__

    def watched(hidden: Any, rows: Any) -> Any:
        out = call(layer, hidden, rows)
        pools = [pool.data[0].clone() for pool in rows.pools]
        for pool in rows.pools:
            pool.data[0].zero_()
        layer.fill(hidden, rows)
        seen.extend(p.sub_(pool.data[0]) for p, pool in zip(pools, rows.pools, strict=True))
        assert all(bool(pool.data[0].any()) for pool in rows.pools)
        return out

    driver.executor.model.layers[0] = watched
    driver.step({slot: 20})
    assert len(seen) == len(driver.groups)
    assert not any(bool(p.any()) for p in seen)
