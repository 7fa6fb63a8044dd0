"""Tiny random drafters as their makers write them: config.json and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bien.core.architectures.registry import read_architecture

VOCAB = 288
FORMATS = ("safeailab", "specforge", "speculators")


def eagle3_config(maker: str, **changes: Any) -> dict[str, Any]:
    """config.json; `changes` go to the level where the format has the field."""
    layer = {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-3,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "rope_theta": 3000.0,
    }
    outer: dict[str, Any] = {"draft_vocab_size": 40}
    inner = {k: v for k, v in changes.items() if k in layer or k.startswith(("rope", "attention_bias"))}
    outer |= {k: v for k, v in changes.items() if k not in inner}
    layer |= inner
    if maker == "speculators":
        return {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": False,
            "transformer_layer_config": layer,
            **outer,
        }
    made_of = "LlamaForCausalLM" if maker == "safeailab" else "LlamaForCausalLMEagle3"
    return {"architectures": [made_of], **layer, **outer}


def eagle3_tensors(maker: str, config: dict[str, Any], *, states: int = 3, seed: int = 5) -> dict[str, Any]:
    """Random tensors by the names of the format."""
    layer = config.get("transformer_layer_config", config)
    hidden, d = layer["hidden_size"], layer["head_dim"]
    target, draft = config.get("target_hidden_size", hidden), config["draft_vocab_size"]
    p = "layers.0." if maker == "speculators" else "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, states * target),
        f"{p}input_layernorm.weight": (hidden,),
        f"{p}hidden_norm.weight": (hidden,),
        f"{p}post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
        **_layer_shapes(p, layer, 2 * hidden, d),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(states)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (states * target,)
    if hidden != target:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
    tensors = draw(shapes, seed)
    if draft < VOCAB:
        ids = np.sort(np.random.default_rng(seed).permutation(VOCAB)[:draft])
        tensors["d2t"] = torch.from_numpy(ids - np.arange(draft))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def write_eagle3(folder: Path, maker: str = "safeailab", *, states: int = 3, **changes: Any) -> Path:
    config = eagle3_config(maker, **changes)
    return write(folder, config, eagle3_tensors(maker, config, states=states))


def write_mtp(folder: Path, names: str = "speculators", seed: int = 6, **changes: Any) -> Path:
    """One layer of the Qwen3 shape, under the names of `speculators` or of "qwen"."""
    layer = {
        "model_type": "qwen3",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-3,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "rope_theta": 3000.0,
        **changes,
    }
    if names == "qwen":
        config, p = layer, "mtp.layers.0."
        around = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    else:
        config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
        p = "mtp_layers.0."
        around = tuple(
            p + n for n in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        )
    hidden = layer["hidden_size"]
    shapes = {
        f"{around[0]}.weight": (hidden, 2 * hidden),
        **_layer_shapes(p, layer, hidden, layer["head_dim"]),
    }
    norms = (*around[1:], p + "input_layernorm", p + "post_attention_layernorm")
    shapes |= {f"{n}.weight": (hidden,) for n in norms}
    return write(folder, config, draw(shapes, seed))


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Norms around 1; heads loud, so that drafts tell what they were made from."""
    rng, out = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif "bias" in name:
            values = 0.3 * values
        elif "embed" not in name:
            values *= (4 if "o_proj" in name or "lm_head" in name else 1.3) / np.sqrt(shape[-1])
        out[name] = torch.from_numpy(values.astype(np.float32))
    return out


def _layer_shapes(p: str, layer: dict[str, Any], inputs: int, d: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    q, kv = layer["num_attention_heads"] * d, layer["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {
        f"{p}self_attn.q_proj.weight": (q, inputs),
        f"{p}self_attn.k_proj.weight": (kv, inputs),
        f"{p}self_attn.v_proj.weight": (kv, inputs),
        f"{p}self_attn.o_proj.weight": (hidden, q),
        f"{p}mlp.gate_proj.weight": (inner, hidden),
        f"{p}mlp.up_proj.weight": (inner, hidden),
        f"{p}mlp.down_proj.weight": (hidden, inner),
    }
    if layer.get("attention_bias"):
        shapes |= {f"{p}self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
        shapes[f"{p}self_attn.o_proj.bias"] = (hidden,)
    if layer["model_type"] == "qwen3":
        shapes |= {f"{p}self_attn.{n}_norm.weight": (d,) for n in "qk"}
    return shapes


def write_predicting(folder: Path, config: dict[str, Any], seed: int = 7) -> Path:
    """A target of bien's own kinds whose folder has all its layers for further tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = read_architecture(folder, 8, "float32").weights
    shapes = {n: w.shape for w in weights if not w.spare for n in w.names()}
    return write(folder, config, draw(shapes, seed))
