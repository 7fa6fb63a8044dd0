"""Tiny random models as folders: Llama and Qwen3 shapes, models with experts; byte tokenizer. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bien.core.architectures.registry import reader_for
from bien.core.architectures.weights import expected

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; then the 256 bytes
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What kinds with experts have beside the fields of all.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 12,
        "attention_bias": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.1,
    },
}


def toy_config(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of a tiny "llama" or "qwen3", or of a kind in `MIXTURES`; `changes` replace fields."""
    config = {
        "model_type": kind,
        "architectures": ["LlamaForCausalLM" if kind == "llama" else "Qwen3ForCausalLM"],
        "vocab_size": 288,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8 if kind == "llama" else 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": kind == "llama",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    return {**config, **MIXTURES.get(kind, {}), **changes}


def write_toy(folder: Path, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model folder (made if missing): config, random weights, tokenizer with ChatML. Returns it.

    Weights are large enough that greedy text varies with the prompt. `changes` go to `toy_config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = toy_config(kind, **changes)
    rng = np.random.default_rng(seed)
    tensors = {name: _values(name, shape, rng) for name, shape in _shapes(config)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: every byte is a token, ChatML markers are special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "chat_template": CHATML,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(text, indent=1))


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind = config["model_type"]
    if kind in MIXTURES:
        architecture = reader_for(kind, "toy").read(config, model="toy", block_tokens=1, dtype="float32")
        yield from expected(architecture.weights).items()
        return
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", heads, hidden),
            ("self_attn.k_proj", kv_heads, hidden),
            ("self_attn.v_proj", kv_heads, hidden),
            ("self_attn.o_proj", hidden, heads),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{prefix}{name}.weight", (rows, columns)
            kind = "attention_bias" if name.startswith("self_attn") else "mlp_bias"
            if config.get(kind):
                yield f"{prefix}{name}.bias", (rows,)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        if config["model_type"] == "qwen3":
            yield f"{prefix}self_attn.q_norm.weight", (d,)
            yield f"{prefix}self_attn.k_norm.weight", (d,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * rng.normal(size=shape)
    elif name.endswith("bias"):
        values = 0.3 * rng.normal(size=shape)
    elif name.endswith("sinks"):
        values = 2 + 2 * rng.normal(size=shape)
    elif "embed" in name:
        values = rng.normal(size=shape)
    else:
        inputs = shape[-1] if len(shape) == 2 else shape[-2]  # of stacked experts the rows
        values = 1.3 * rng.normal(size=shape) / np.sqrt(inputs)
    return values.astype(np.float32)
