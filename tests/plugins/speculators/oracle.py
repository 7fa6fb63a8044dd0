"""EAGLE-3 and layers for further tokens by their papers' formulas: whole texts, head by head, no cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Embed = Callable[[Tensor], Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, theta: float, factor: float = 1.0) -> Tensor:
    """x [T, d] at positions 0.. : features j and j + d / 2 make a pair."""
    length, d = x.shape
    angle = torch.arange(length)[:, None] * (theta ** -(torch.arange(0, d, 2) / d) / factor)[None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x: Tensor, w: dict[str, Tensor], p: str, c: dict[str, Any]) -> Tensor:
    """x [T, inputs] -> [T, hidden], causal."""
    d, heads, kv_heads = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    theta, eps = c["rope_theta"], c["rms_norm_eps"]
    factor = (c.get("rope_scaling") or {}).get("factor", 1.0)

    def linear(name: str, x: Tensor) -> Tensor:
        out = x @ w[f"{p}{name}_proj.weight"].T
        return out + w[f"{p}{name}_proj.bias"] if f"{p}{name}_proj.bias" in w else out

    def head(name: str, all: Tensor, i: int) -> Tensor:
        one = all[:, i * d : (i + 1) * d]
        if f"{p}{name}_norm.weight" in w:
            one = rms(one, w[f"{p}{name}_norm.weight"], eps)
        return rotated(one, theta, factor)

    q, k, v = (linear(n, x) for n in "qkv")
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    out = []
    for h in range(heads):
        of = h // (heads // kv_heads)
        scores = head("q", q, h) @ head("k", k, of).T / math.sqrt(d)
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
        out.append(weights @ v[:, of * d : (of + 1) * d])
    return linear("o", torch.cat(out, -1))


def mlp(x: Tensor, w: dict[str, Tensor], p: str) -> Tensor:
    gate = x @ w[f"{p}gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ w[f"{p}up_proj.weight"].T)) @ w[f"{p}down_proj.weight"].T


def eagle3(
    w: dict[str, Tensor],
    config: dict[str, Any],
    embed: Embed,
    aux: list[Tensor],
    tokens: list[int],
    drafts: list[int],
) -> list[Tensor]:
    """Logits over the draft vocabulary behind tokens, and behind every draft. `aux`: the target's states of
    all but the last token (which has not been computed)."""
    c = config.get("transformer_layer_config", config)
    eps, p = c["rms_norm_eps"], "layers.0." if "transformer_layer_config" in config else "midlayer."
    if config.get("fc_norm"):
        aux = [rms(x, w[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(aux)]
    both = torch.cat(aux, -1)
    if config.get("norm_before_fc"):
        both = rms(both, w["input_norm.weight"], eps)
    states, logits = both @ w["fc.weight"].T, []  # g of positions 0 .. n-1, each paired with the next token
    for step in range(len(drafts) + 1):
        words = embed(torch.tensor([*tokens[1:], *drafts[:step]]))
        normed = rms(states, w[f"{p}hidden_norm.weight"], eps)
        residual = normed if config.get("norm_before_residual") else states
        x = torch.cat([rms(words, w[f"{p}input_layernorm.weight"], eps), normed], -1)
        a = residual + attention(x, w, f"{p}self_attn.", c)
        a = a + mlp(rms(a, w[f"{p}post_attention_layernorm.weight"], eps), w, f"{p}mlp.")
        last = rms(a[-1:], w["norm.weight"], eps)
        logits.append((last @ w["lm_head.weight"].T)[0])
        states = torch.cat([states, last if config.get("norm_output") else a[-1:]])
    return logits


def mtp(
    w: dict[str, Tensor],
    c: dict[str, Any],
    names: tuple[str, str, str, str, str],
    embed: Embed,
    head: Callable[[Tensor], Tensor],
    states: Tensor,
    tokens: list[int],
    drafts: list[int],
) -> list[Tensor]:
    """Logits behind tokens, and behind every draft, of one layer that is used again. `names`: of the layer's
    tensors what precedes them, the merging product, norms of words, of states, and behind the layer.
    `states`: the target's, normed, of all but the last token."""
    p, merge, word_norm, state_norm, final = names
    eps, logits = c["rms_norm_eps"], []
    for step in range(len(drafts) + 1):
        words = embed(torch.tensor([*tokens[1:], *drafts[:step]]))
        both = [rms(words, w[f"{word_norm}.weight"], eps), rms(states, w[f"{state_norm}.weight"], eps)]
        x = torch.cat(both, -1) @ w[f"{merge}.weight"].T
        x = x + attention(rms(x, w[f"{p}input_layernorm.weight"], eps), w, f"{p}self_attn.", c)
        x = x + mlp(rms(x, w[f"{p}post_attention_layernorm.weight"], eps), w, f"{p}mlp.")
        out = rms(x[-1:], w[f"{final}.weight"], eps)
        logits.append(head(out)[0])
        states = torch.cat([states, out])
    return logits


def tree(
    logits: Callable[[tuple[int, ...]], Tensor], ids: list[int], limit: int, depth: int, top_k: int
) -> list[tuple[tuple[int, ...], float]]:
    """EAGLE-2's tree as paths and their log-probabilities, the likeliest first. `logits`: behind a path."""
    found: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(min(depth, limit)):
        grown: dict[tuple[int, ...], float] = {}
        for path in level:
            chances = torch.log_softmax(logits(path), -1)
            best = sorted(range(len(ids)), key=lambda i: -float(chances[i]))[:top_k]
            grown |= {(*path, ids[i]): found.get(path, 0.0) + float(chances[i]) for i in best}
        found |= grown
        level = sorted(grown, key=lambda path: -grown[path])[:top_k]
    return sorted(found.items(), key=lambda item: -item[1])[:limit]
