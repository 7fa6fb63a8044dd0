"""Kimi-Linear and Kimi K3 written down from their formulas: one text at a time, token by token, in float64.

Knows nothing of batches, blocks, kept states or absorbed projections, and shares no code with the models.
`write_tiny` makes folders with random weights, every feature with a value of its own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

F64 = NDArray[np.float64]
VOCAB = 97


def linear_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny Kimi-Linear."""
    return {
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 12,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "moe_layer_freq": 1,
        "num_expert_group": 4,
        "topk_group": 2,
        "use_grouped_topk": True,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-2,
        "model_max_length": 512,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": None,
        "linear_attn_config": {
            "full_attn_layers": [3, 5],
            "kda_layers": [1, 2, 4],
            "head_dim": 8,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        **changes,
    }


def k3_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny Kimi K3; `changes` are the text model's."""
    text = linear_config(
        hidden_act="situ",
        num_hidden_layers=7,
        q_lora_rank=14,
        mla_use_output_gate=True,
        routed_expert_hidden_size=20,
        latent_moe_use_norm=True,
        attn_res_block_size=3,
        activation_situ_beta=1.5,
        activation_situ_linear_beta=2.5,
        first_k_dense_replace=1,
        linear_attn_config={
            "full_attn_layers": [2, 5, 7],
            "kda_layers": [1, 3, 4, 6],
            "head_dim": 8,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
            "use_full_rank_gate": True,
            "gate_lower_bound": -1.5,
        },
    )
    text["max_position_embeddings"] = text.pop("model_max_length")
    return {"model_type": "kimi_k3", "text_config": {**text, **changes}, "vision_config": {"depth": 1}}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model, by the names that Moonshot AI's checkpoints have."""
    c = config.get("text_config", config)
    k3 = config["model_type"] == "kimi_k3"
    h, heads, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    nope, rope, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    own = c["linear_attn_config"]
    d, n, kernel = own["head_dim"], own["num_heads"], own["short_conv_kernel_size"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (vocab, h),
    }
    if k3:
        out |= {"model.output_attn_res_norm.weight": (h,), "model.output_attn_res_proj.weight": (1, h)}
    for i in range(c["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
        }
        if k3:
            for name in ("self_attention_res", "mlp_res"):
                layer |= {f"{name}_norm.weight": (h,), f"{name}_proj.weight": (1, h)}
        if i + 1 in own["full_attn_layers"]:
            attention = {
                "kv_a_proj_with_mqa.weight": (rank + rope, h),
                "kv_a_layernorm.weight": (rank,),
                "kv_b_proj.weight": (heads * (nope + c["v_head_dim"]), rank),
                "o_proj.weight": (h, heads * c["v_head_dim"]),
            }
            if c["q_lora_rank"] is None:
                attention["q_proj.weight"] = (heads * (nope + rope), h)
            else:
                attention |= {
                    "q_a_proj.weight": (c["q_lora_rank"], h),
                    "q_a_layernorm.weight": (c["q_lora_rank"],),
                    "q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
                }
            if c.get("mla_use_output_gate"):
                attention["g_proj.weight"] = (heads * c["v_head_dim"], h)
        else:
            attention = {f"{x}_proj.weight": (n * d, h) for x in "qkv"}
            attention |= {f"{x}_conv1d.weight": (n * d, 1, kernel) for x in "qkv"}
            attention |= {
                "f_a_proj.weight": (d, h),
                "f_b_proj.weight": (n * d, d),
                "b_proj.weight": (n, h),
                "A_log": (d,) if k3 else (1, 1, n, 1),
                "dt_bias": (n * d,),
                "o_norm.weight": (d,),
                "o_proj.weight": (h, n * d),
            }
            if own.get("use_full_rank_gate"):
                attention["g_proj.weight"] = (n * d, h)
            else:
                attention |= {"g_a_proj.weight": (d, h), "g_b_proj.weight": (n * d, d)}
        layer |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if i < c["first_k_dense_replace"]:
            layer |= _gated("mlp.", h, c["intermediate_size"])
        else:
            inner, moe = c["moe_intermediate_size"], "block_sparse_moe."
            width = c.get("routed_expert_hidden_size") or h
            layer[f"{moe}gate.weight"] = (c["num_experts"], h)
            layer[f"{moe}gate.e_score_correction_bias"] = (c["num_experts"],)
            for e in range(c["num_experts"]):
                layer |= {
                    f"{moe}experts.{e}.w1.weight": (inner, width),
                    f"{moe}experts.{e}.w2.weight": (width, inner),
                    f"{moe}experts.{e}.w3.weight": (inner, width),
                }
            if c.get("routed_expert_hidden_size"):
                layer[f"{moe}routed_expert_down_proj.weight"] = (width, h)
                layer[f"{moe}routed_expert_up_proj.weight"] = (h, width)
                if c["latent_moe_use_norm"]:
                    layer[f"{moe}routed_expert_norm.weight"] = (width,)
            layer |= _gated(f"{moe}shared_experts.", h, inner * c["num_shared_experts"])
        out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return out


def _gated(prefix: str, h: int, inner: int) -> dict[str, tuple[int, ...]]:
    wide = {f"{prefix}{n}_proj.weight": (inner, h) for n in ("gate", "up")}
    return wide | {f"{prefix}down_proj.weight": (h, inner)}


def write_tiny(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Random weights for the config. Those of Kimi K3 lie beside a tensor of its vision tower."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    nested = config["model_type"] == "kimi_k3"
    prefix = "language_model." if nested else ""
    tensors = {
        prefix + name: _tensor(name, shape, rng).astype(np.float32) for name, shape in shapes(config).items()
    }
    if nested:
        tensors["vision_tower.patch_embed.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if "norm" in name:
        return 1 + 0.2 * rng.normal(size=shape)
    if name.endswith(("e_score_correction_bias", "A_log")):
        return rng.normal(size=shape) * 0.5
    if name.endswith("dt_bias"):
        return rng.normal(size=shape) - 3.0  # states that remember
    if "embed" in name or "conv1d" in name:
        return rng.normal(size=shape)
    # Strong mixers: a state that was lost must change the greedy tokens, or no test would see it.
    gain = 3.0 if name.endswith("self_attn.o_proj.weight") else 1.3
    return rng.normal(size=shape) * gain / np.sqrt(shape[-1])


class Oracle:
    """Logits of every position of one text, recomputed from nothing."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.k3 = config["model_type"] == "kimi_k3"
        self.c = config.get("text_config", config)
        self.w = {
            name.removeprefix("language_model."): tensor.astype(np.float64)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }

    def logits(self, tokens: list[int]) -> F64:
        x: F64 = self.w["model.embed_tokens.weight"][tokens]
        x = self.residual(x) if self.k3 else self.plain(x)
        out: F64 = self.norm(x, "model.norm.weight") @ self.w["lm_head.weight"].T
        return out

    def plain(self, x: F64) -> F64:
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            x = x + self.mixer(i, self.norm(x, p + "input_layernorm.weight"))
            x = x + self.feed_forward(i, self.norm(x, p + "post_attention_layernorm.weight"))
        return x

    def residual(self, x: F64) -> F64:
        blocks: list[F64] = []
        total: F64 | None = x
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            assert total is not None
            entering = self.mix(blocks, total, p + "self_attention_res")
            if i % self.c["attn_res_block_size"] == 0:
                blocks, total = [*blocks, total], None
            said = self.mixer(i, self.norm(entering, p + "input_layernorm.weight"))
            total = said if total is None else total + said
            entering = self.mix(blocks, total, p + "mlp_res")
            total = total + self.feed_forward(i, self.norm(entering, p + "post_attention_layernorm.weight"))
        assert total is not None
        return self.mix(blocks, total, "model.output_attn_res")

    def mix(self, blocks: list[F64], total: F64, name: str) -> F64:
        values = np.stack([*blocks, total])  # [blocks + 1, T, H]
        scores = self.norm(values, f"{name}_norm.weight") @ self.w[f"{name}_proj.weight"][0]
        shares = np.exp(scores - scores.max(0))
        mixed: F64 = ((shares / shares.sum(0))[..., None] * values).sum(0)
        return mixed

    def norm(self, x: F64, name: str, eps: float | None = None) -> F64:
        eps = self.c["rms_norm_eps"] if eps is None else eps
        scaled: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[name]
        return scaled

    def mixer(self, i: int, x: F64) -> F64:
        p = f"model.layers.{i}.self_attn."
        if i + 1 in self.c["linear_attn_config"]["full_attn_layers"]:
            return self.attention(p, x)
        return self.delta(p, x)

    def attention(self, p: str, x: F64) -> F64:
        c, heads = self.c, self.c["num_attention_heads"]
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        if c["q_lora_rank"] is None:
            q = x @ self.w[p + "q_proj.weight"].T
        else:
            low = self.norm(x @ self.w[p + "q_a_proj.weight"].T, p + "q_a_layernorm.weight", 1e-6)
            q = low @ self.w[p + "q_b_proj.weight"].T
        q = q.reshape(len(x), heads, nope + rope)
        both = x @ self.w[p + "kv_a_proj_with_mqa.weight"].T
        latent = self.norm(both[:, : c["kv_lora_rank"]], p + "kv_a_layernorm.weight", 1e-6)
        common = both[:, c["kv_lora_rank"] :]
        kv = (latent @ self.w[p + "kv_b_proj.weight"].T).reshape(len(x), heads, nope + value)
        out = np.zeros((len(x), heads, value))
        for t in range(len(x)):
            for h in range(heads):
                keys = np.concatenate([kv[: t + 1, h, :nope], common[: t + 1]], -1)
                scores = keys @ q[t, h] / math.sqrt(nope + rope)
                share = np.exp(scores - scores.max())
                out[t, h] = (share / share.sum()) @ kv[: t + 1, h, nope:]
        flat = out.reshape(len(x), -1)
        if c.get("mla_use_output_gate"):
            flat = flat * sigmoid(x @ self.w[p + "g_proj.weight"].T)
        mixed: F64 = flat @ self.w[p + "o_proj.weight"].T
        return mixed

    def delta(self, p: str, x: F64) -> F64:
        own = self.c["linear_attn_config"]
        d, heads, kernel = own["head_dim"], own["num_heads"], own["short_conv_kernel_size"]
        convolved = {}
        for n in "qkv":
            line = np.concatenate([np.zeros((kernel - 1, heads * d)), x @ self.w[f"{p}{n}_proj.weight"].T])
            taps = self.w[f"{p}{n}_conv1d.weight"][:, 0]
            y = np.stack([(line[t : t + kernel] * taps.T).sum(0) for t in range(len(x))])
            convolved[n] = (y * sigmoid(y)).reshape(len(x), heads, d)
        f = x @ self.w[p + "f_a_proj.weight"].T @ self.w[p + "f_b_proj.weight"].T + self.w[p + "dt_bias"]
        f = f.reshape(len(x), heads, d)
        speed = np.exp(self.w[p + "A_log"].reshape(-1)[:heads])[:, None]
        bound = own.get("gate_lower_bound")
        decay = -speed * np.log1p(np.exp(f)) if bound is None else bound * sigmoid(speed * f)
        beta = sigmoid(x @ self.w[p + "b_proj.weight"].T)
        out = np.zeros((len(x), heads, d))
        for h in range(heads):
            state = np.zeros((d, d))  # [key, value]
            for t in range(len(x)):
                q, k = (convolved[n][t, h] / np.sqrt((convolved[n][t, h] ** 2).sum() + 1e-6) for n in "qk")
                state = np.exp(decay[t, h])[:, None] * state
                state = state + beta[t, h] * np.outer(k, convolved["v"][t, h] - k @ state)
                out[t, h] = q @ state / math.sqrt(d)
        if own.get("use_full_rank_gate"):
            gate = x @ self.w[p + "g_proj.weight"].T
        else:
            gate = x @ self.w[p + "g_a_proj.weight"].T @ self.w[p + "g_b_proj.weight"].T
        normed = self.norm(out, p + "o_norm.weight").reshape(len(x), -1) * sigmoid(gate)
        mixed: F64 = normed @ self.w[p + "o_proj.weight"].T
        return mixed

    def feed_forward(self, i: int, x: F64) -> F64:
        if i < self.c["first_k_dense_replace"]:
            return self.gated(f"model.layers.{i}.mlp.", x)
        c, p = self.c, f"model.layers.{i}.block_sparse_moe."
        scores = sigmoid(x @ self.w[p + "gate.weight"].T)
        wish = scores + self.w[p + "gate.e_score_correction_bias"]
        low = x
        if c.get("routed_expert_hidden_size"):
            low = x @ self.w[p + "routed_expert_down_proj.weight"].T
        routed = np.zeros_like(low)
        size = c["num_experts"] // c["num_expert_group"]
        for t in range(len(x)):
            groups = [
                sum(sorted(wish[t, g * size : (g + 1) * size])[-2:]) for g in range(len(wish[t]) // size)
            ]
            best = sorted(range(len(groups)), key=lambda g: -groups[g])[: c["topk_group"]]
            experts = [e for e in range(c["num_experts"]) if e // size in best]
            experts = sorted(experts, key=lambda e: -wish[t, e])[: c["num_experts_per_token"]]
            share = scores[t, experts]
            if c["moe_renormalize"]:
                share = share / share.sum()
            for e, weight in zip(experts, share * c["routed_scaling_factor"], strict=True):
                said = self.gated(f"{p}experts.{e}.", low[t : t + 1], ("w1", "w3", "w2"))
                routed[t] += weight * said[0]
        if c.get("routed_expert_hidden_size"):
            if c["latent_moe_use_norm"]:
                routed = self.norm(routed, p + "routed_expert_norm.weight")
            routed = routed @ self.w[p + "routed_expert_up_proj.weight"].T
        return routed + self.gated(f"{p}shared_experts.", x)

    def gated(
        self, p: str, x: F64, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> F64:
        gate, up = (x @ self.w[f"{p}{n}.weight"].T for n in names[:2])
        if self.c["hidden_act"] == "situ":
            beta, linear = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
            inner = beta * np.tanh(gate / beta) * sigmoid(gate) * linear * np.tanh(up / linear)
        else:
            inner = gate * sigmoid(gate) * up
        out: F64 = inner @ self.w[f"{p}{names[2]}.weight"].T
        return out


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))
