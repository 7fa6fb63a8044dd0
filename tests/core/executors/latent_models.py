"""Tiny models with latent attention, as transformers saves them. No feature has its usual value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from bien.core.architectures.registry import read_architecture
from bien.core.architectures.weights import expected

YARN = {
    "rope_type": "yarn",
    "rope_theta": 9000.0,
    "factor": 6.4,
    "original_max_position_embeddings": 80,
    "beta_fast": 5.0,
    "beta_slow": 0.05,
    "mscale": 0.8,
    "mscale_all_dim": 1.3,
}
SHAPE = {
    "vocab_size": 288,
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 32,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 3e-3,
    "max_position_embeddings": 512,
    "rope_parameters": YARN,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
# Many heads: with few, ReLU makes many scores zero, and transformers does not say which of equals it takes.
INDEXER = {"index_n_heads": 24, "index_head_dim": 14, "index_topk": 9}


def save(folder: Path, kind: str, seed: int = 1, **changes: Any) -> Path:
    """A random model of `kind` ("DeepseekV3", ...) as a folder; small weights of norms and biases too."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    torch.manual_seed(seed)
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if "bias" in name:
            torch.nn.init.normal_(tensor, 0.0, 0.3)
        elif "norm" in name:
            torch.nn.init.normal_(tensor, 1.0, 0.2)
        elif "kv_a_proj" in name or "q_a_proj" in name:
            tensor.data.mul_(0.03)  # so small that the norm behind them shows its epsilon
    made.save_pretrained(folder)
    return folder


def draw(folder: Path, kind: str, **changes: Any) -> Path:
    """A random model of `model_type` as a folder, without transformers."""
    config = {"model_type": kind, "hidden_act": "silu", **SHAPE, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(2)
    tensors = {}
    for name, shape in expected(read_architecture(folder, 8, "float32").weights).items():
        spread = 0.2 if "norm" in name else 0.3 if "bias" in name else 1.3 / shape[-1] ** 0.5
        tensors[name] = (rng.normal(size=shape) * spread + ("norm" in name)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


# Seeds with which no choice of an expert or a position, in the texts of the parity tests, is within ten times
# the rounding of float32 of going the other way (with others it was within four): where memory lies decides
# how products are rounded.
LATENT: dict[str, Callable[[Path], Path]] = {
    "deepseek-v3": lambda f: save(f, "DeepseekV3", seed=6, attention_bias=True),
    "deepseek-v3-plain": lambda f: save(
        f,
        "DeepseekV3",
        seed=2,
        attention_bias=True,
        q_lora_rank=None,
        rope_interleave=False,
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    ),
    "deepseek-v3.2": lambda f: save(
        f,
        "DeepseekV32",
        seed=42,
        attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        **INDEXER,
    ),
    "glm-5": lambda f: save(
        f,
        "GlmMoeDsa",
        seed=2,
        num_hidden_layers=5,
        indexer_types=["full", "shared", "full", "shared", "shared"],
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        **INDEXER,
    ),
}
