"""Models that are known by name: their configs are here, so that a simulation needs no download."""

from __future__ import annotations

from typing import Any

SMOLLM2 = "smollm2-135m"

# SmolLM2-135M-Instruct (Apache-2.0), read from the GGUF that `bien.core.models.fetch` unpacks.
BUILTIN: dict[str, dict[str, Any]] = {
    SMOLLM2: {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
}
