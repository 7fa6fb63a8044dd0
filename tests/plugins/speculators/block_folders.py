"""Random block drafters as folders, in the formats that are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 1024,
    "vocab_size": 288,
}
LAYERS, TARGET_LAYERS, TAPS, MASK = 3, 5, [0, 2, 3], 270
FULL, SLIDING = "full_attention", "sliding_attention"


def z_lab(**own: Any) -> dict[str, Any]:
    """DFlash of z-lab: what decides lies in `dflash_config`; `own`: fields that go there."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "layer_types": [FULL] * LAYERS,
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS, **own},
        **SHAPE,
    }


def second(**own: Any) -> dict[str, Any]:
    """DFlash 2 of z-lab."""
    more = {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 5,
        "block_size": 5,
    }
    config = z_lab(**{**more, **own})
    del config["block_size"]
    return {**config, "architectures": ["DFlash2DraftModel"], "is_causal": False}


def spec_forge(**own: Any) -> dict[str, Any]:
    """DSpark of SpecForge."""
    more = {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return {**z_lab(**{**more, **own}), "architectures": ["DSparkDraftModel"]}


def deep_spec(**changes: Any) -> dict[str, Any]:
    """DSpark of DeepSpec: a copy of the target's config with more at the top level."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "layer_types": [FULL] * LAYERS,
        "block_size": 6,
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "num_anchors": 512,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **SHAPE,
        **changes,
    }


def speculators(kind: str, **changes: Any) -> dict[str, Any]:
    """Of vllm-project/speculators: target layers are counted by what enters them, one more than elsewhere."""
    layer = {**SHAPE, "model_type": "qwen3", "num_hidden_layers": LAYERS, "layer_types": [FULL] * LAYERS}
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": kind, "proposal_methods": [], "verifier": {"architectures": []}},
        "transformer_layer_config": layer,
        "draft_vocab_size": 96,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "block_size": 6,
        "mask_token_id": MASK,
        **({"markov_rank": 8, "enable_confidence_head": True} if kind == "dspark" else {}),
        **changes,
    }


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint with this config (full layers, no copies)."""
    layer = config.get("transformer_layer_config", config)
    own = {**config, **config.get("dflash_config", {})}
    hidden, inner, vocab = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    wide, narrow = (layer[f"num_{n}_heads"] * layer["head_dim"] for n in ("attention", "key_value"))
    taps = own.get("target_layer_ids") or own["aux_hidden_state_layer_ids"]
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(layer["num_hidden_layers"]):
        each = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (wide, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, wide),
            "self_attn.q_norm": (layer["head_dim"],),
            "self_attn.k_norm": (layer["head_dim"],),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        found |= {f"layers.{i}.{name}.weight": shape for name, shape in each.items()}
        if taken := own.get("conv_kernel_size"):
            for name in ("attention_conv", "mlp_conv"):
                kernels = 2 * taken * hidden // own["conv_group_size"]
                found[f"layers.{i}.{name}.base_kernel"] = (2, taken, hidden)
                found[f"layers.{i}.{name}.kernel_projection.weight"] = (kernels, hidden)
    if rank := own.get("selector_rank"):
        found["candidate_selector.predecessor_codebook"] = (vocab, rank)
        found["candidate_selector.successor_codebook"] = (vocab, rank)
        found["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    draft = own.get("draft_vocab_size", vocab)
    if rank := own.get("markov_rank"):
        found["markov_head.markov_w1.weight"] = (vocab, rank)
        found["markov_head.markov_w2.weight"] = (draft, rank)
        kind = own.get("markov_head_type", "vanilla")
        if kind == "gated":
            found["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            found["markov_head.gate_proj.bias"] = (rank,)
        if kind == "rnn":
            found["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            found["markov_head.joint_proj.bias"] = (3 * rank,)
    if own.get("enable_confidence_head"):
        width = hidden + (rank if own.get("confidence_head_with_markov") else 0)
        found["confidence_head.proj.weight"] = (1, width)
        found["confidence_head.proj.bias"] = (1,)
    if draft != vocab:
        found["lm_head.weight"] = (draft, hidden)
        found["d2t"] = (draft,)
        found["t2d"] = (vocab,)
    return found


def write_drafter(folder: Path, config: dict[str, Any], seed: int = 0, **more: Any) -> Path:
    """Config and random weights; `more`: further tensors, or other ones."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {name: _values(name, shape, rng) for name, shape in shapes(config).items()}
    save_file({**tensors, **more}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if name == "d2t":  # offsets: draft token i is token 3 i + 1
        return np.arange(shape[0], dtype=np.int64) * 2 + 1
    if name == "t2d":
        return np.arange(shape[0]) % 3 == 1
    if name.endswith("norm.weight"):
        return (1 + 0.2 * rng.normal(size=shape)).astype(np.float32)
    if name.endswith("bias"):
        return (0.5 * rng.normal(size=shape)).astype(np.float32)
    # Loud, so that drafts tell what was in the KV blocks and what came before.
    loud = 3.0 if "o_proj" in name or "markov_w" in name or "codebook" in name else 1.2
    inputs = 1 if "w1" in name or "codebook" in name else shape[-1]
    return (loud * rng.normal(size=shape) / np.sqrt(inputs)).astype(np.float32)
