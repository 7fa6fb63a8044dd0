"""A tiny hybrid model as a folder: config.json and random safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bien.core.architectures.tiny_hybrid import READER
from bien.core.architectures.weights import expected

LAYER_TYPES = ("linear_attention", "sliding_attention", "linear_attention", "full_attention")


def hybrid_config(**changes: Any) -> dict[str, Any]:
    """config.json of a model with every kind of layer; `changes` replace fields."""
    types = changes.get("layer_types", LAYER_TYPES)
    return {
        "model_type": "tiny_hybrid",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(types),
        "layer_types": list(types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 24,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        **changes,
    }


def write_tiny_hybrid(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write the model into `folder` (made if missing) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hybrid_config(**changes)
    architecture = READER.read(config, model=str(folder), block_tokens=16, dtype="float32")
    rng = np.random.default_rng(seed)
    tensors = {
        name: _tensor(name, shape, rng).astype(np.float32)
        for name, shape in expected(architecture.weights).items()
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if name.endswith("norm.weight"):
        return 1 + 0.1 * rng.normal(size=shape)
    if name.endswith("decay_proj.bias"):
        return rng.normal(size=shape) - 4.0  # states that forget over a hundred tokens
    if name.endswith(".bias") or "embed" in name:
        return rng.normal(size=shape)
    # Strong mixers: a state that was lost must change the greedy tokens, or no test would see it.
    gain = 4.0 if name.endswith("linear_attn.o_proj.weight") else 1.2
    return rng.normal(size=shape) * gain / np.sqrt(shape[-1])
