"""The oracle of block drafters: the papers' formulas, slot by slot and head by head, on whole sequences.

No cache, no batch, no masks: what a slot sees is a list. So is the target, of the Llama shape.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_states: dict[tuple[Path, tuple[int, ...]], list[list[Tensor]]] = {}


class Oracle:
    def __init__(self, drafter: Path, target: Path) -> None:
        self.config = json.loads((drafter / "config.json").read_text())
        self.own = {**self.config, **self.config.get("dflash_config", {})}
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.w = wide(load_file(drafter / "model.safetensors"))
        self.folder = target
        self.target = json.loads((target / "config.json").read_text())
        self.theirs = wide(load_file(target / "model.safetensors"))
        self.spark = self.config["architectures"][0] in ("DSparkDraftModel", "Qwen3DSparkModel")

    def states(self, tokens: list[int]) -> list[list[Tensor]]:
        """What leaves the target's embedding, and each of its layers, per position."""
        key = self.folder, tuple(tokens)
        if key not in _states:
            _states[key] = self.computed(tokens)
        return _states[key]

    def computed(self, tokens: list[int]) -> list[list[Tensor]]:
        c, w = self.target, self.theirs
        x = [w["model.embed_tokens.weight"][t] for t in tokens]
        found = [x]
        for i in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{i}."
            normed = [norm(h, w[f"{prefix}input_layernorm.weight"], c) for h in x]
            attention = Heads(w, f"{prefix}self_attn.", c)
            past = [attention.entry(h, at) for at, h in enumerate(normed)]
            mixed = [attention(h, at, past[: at + 1]) for at, h in enumerate(normed)]
            x = [a + b for a, b in zip(x, mixed, strict=True)]
            fed = [norm(h, w[f"{prefix}post_attention_layernorm.weight"], c) for h in x]
            x = [a + fed_forward(h, w, f"{prefix}mlp.") for a, h in zip(x, fed, strict=True)]
            found.append(x)
        return found

    @torch.no_grad()
    def block(self, text: list[int], window: int = 0) -> Tensor:
        """The states [B, H] of the block behind a text, the last token of which is the anchor."""
        own, w = self.own, self.w
        anchor = len(text) - 1
        hidden = self.states(text[:anchor])
        taps = own.get("target_layer_ids")
        if taps is None:
            taps = [i - 1 for i in own["aux_hidden_state_layer_ids"]]
        context = []
        for j in range(anchor):
            states = torch.cat([hidden[0 if tap == -1 else tap + 1][j] for tap in taps])
            context.append(self.norm(w["fc.weight"] @ states, w["hidden_norm.weight"]))
        slots = [text[anchor]] + [own["mask_token_id"]] * (own["block_size"] - 1)
        table = w.get("embed_tokens.weight", self.theirs["model.embed_tokens.weight"])
        x = [table[t] * own.get("input_embedding_scale", 1.0) for t in slots]
        for i in range(self.layer["num_hidden_layers"]):
            x = self.one_layer(i, x, context, anchor, window)
        return torch.stack([self.norm(h, w["norm.weight"]) for h in x])

    def one_layer(
        self, i: int, x: list[Tensor], context: list[Tensor], anchor: int, window: int
    ) -> list[Tensor]:
        w, prefix = self.w, f"layers.{i}."
        normed = [self.norm(h, w[f"{prefix}input_layernorm.weight"]) for h in x]
        normed, kernels = self.convolve(f"{prefix}attention_conv.", normed, 0, None)
        mixed = self.attention(i, normed, context, anchor, window)
        mixed, _ = self.convolve(f"{prefix}attention_conv.", mixed, 1, kernels)
        x = [a + b for a, b in zip(x, mixed, strict=True)]
        normed = [self.norm(h, w[f"{prefix}post_attention_layernorm.weight"]) for h in x]
        normed, kernels = self.convolve(f"{prefix}mlp_conv.", normed, 0, None)
        out = [fed_forward(h, w, f"{prefix}mlp.") for h in normed]
        out, _ = self.convolve(f"{prefix}mlp_conv.", out, 1, kernels)
        return [a + b for a, b in zip(x, out, strict=True)]

    def attention(
        self, i: int, x: list[Tensor], context: list[Tensor], anchor: int, given: int
    ) -> list[Tensor]:
        layer, w, prefix = self.layer, self.w, f"layers.{i}.self_attn."
        sliding = layer["layer_types"][i] == "sliding_attention"
        window = layer["sliding_window"] if sliding else math.inf
        window = min(window, given or math.inf)
        causal = self.own.get("causal", self.config.get("is_causal"))
        if causal is None:
            deep = self.config["architectures"] == ["Qwen3DSparkModel"]
            causal = sliding and not self.own.get("sliding_window_non_causal") and not deep
        attend = Heads(w, prefix, layer)
        past = [attend.entry(c, j) for j, c in enumerate(context)]
        own = [attend.entry(h, anchor + j) for j, h in enumerate(x)]
        found = []
        for slot, h in enumerate(x):
            at = anchor + slot
            seen = [entry for j, entry in enumerate(past) if at - j < window]
            seen += own[: slot + 1] if causal else own
            found.append(attend(h, at, seen))
        return found

    def convolve(
        self, prefix: str, x: list[Tensor], side: int, kernels: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        if f"{prefix}base_kernel" not in self.w:
            return x, None
        group, base = self.own["conv_group_size"], self.w[f"{prefix}base_kernel"]
        taps = base.shape[1]
        if kernels is None:
            made = [self.w[f"{prefix}kernel_projection.weight"] @ h for h in x]
            kernels = [m.view(2, taps, -1) for m in made]
        out = []
        for t in range(len(x)):
            total = torch.zeros_like(x[t])
            for tap in range(taps):
                if t - tap >= 0:
                    computed = kernels[t][side, tap, [f // group for f in range(len(total))]]
                    total += (base[side, tap] + computed) * x[t - tap]
            out.append(total)
        return out, kernels

    @torch.no_grad()
    def walk(
        self, text: list[int], hidden: Tensor, picks: list[int]
    ) -> tuple[list[dict[int, float]], list[float]]:
        """Of each draft what it may be drawn from, token id -> score, and the confidence, when what is drawn
        are `picks`: draft k follows the anchor and picks[:k]."""
        own, w = self.own, self.w
        first = 0 if own.get("sample_from_anchor", self.spark) else 1
        head = w.get("lm_head.weight", self.theirs["lm_head.weight"])
        ids = torch.arange(len(head)) + w.get("d2t", torch.tensor(0))
        before, laws, chances = text[-1], [], []
        state = torch.zeros(own.get("markov_rank") or 0, dtype=torch.float64)
        for k, pick in enumerate(picks):
            h = hidden[first + k]
            logits = head @ h * own.get("output_multiplier", 1.0)
            if cap := own.get("final_logit_softcapping"):
                logits = cap * torch.tanh(logits / cap)
            if own.get("markov_rank"):
                word = w["markov_head.markov_w1.weight"][before]
                kind = own.get("markov_head_type", "vanilla")
                latent = word
                if kind == "gated":
                    joint = w["markov_head.gate_proj.weight"] @ torch.cat([h, word])
                    latent = torch.sigmoid(joint + w["markov_head.gate_proj.bias"]) * word
                if kind == "rnn":
                    joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, word, h])
                    gate, candidate, out = (joint + w["markov_head.joint_proj.bias"]).chunk(3)
                    share = torch.sigmoid(gate)
                    state = share * state + (1 - share) * torch.tanh(candidate)
                    latent = torch.tanh(out)
                logits = logits + w["markov_head.markov_w2.weight"] @ latent
            law = {int(i): float(s) for i, s in zip(ids, logits, strict=True)}
            if own.get("selector_rank"):
                link = w["candidate_selector.predecessor_codebook"][before]
                link = link * (w["candidate_selector.hidden_projection.weight"] @ h)
                best = sorted(law, key=lambda t: -law[t])[: own["selector_top_k"]]
                law = {t: law[t] + float(link @ w["candidate_selector.successor_codebook"][t]) for t in best}
            if own.get("enable_confidence_head"):
                features = torch.cat([h, word]) if own.get("confidence_head_with_markov") else h
                logit = w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0]
                chances.append(float(torch.sigmoid(logit)))
            else:
                chances.append(float(torch.softmax(torch.tensor(list(law.values())), 0).max()))
            laws.append(law)
            before = pick
        return laws, chances

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight, self.layer)


class Heads:
    """Grouped-query attention of one token over the entries that it sees."""

    def __init__(self, w: dict[str, Tensor], prefix: str, c: dict[str, Any]) -> None:
        self.w, self.prefix, self.c = w, prefix, c

    def entry(self, x: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Key and value of a normed state at a position."""
        return self.part("k", x, at), (self.w[f"{self.prefix}v_proj.weight"] @ x).view(-1, self.c["head_dim"])

    def part(self, name: str, x: Tensor, at: int) -> Tensor:
        each = (self.w[f"{self.prefix}{name}_proj.weight"] @ x).view(-1, self.c["head_dim"])
        scale = self.w.get(f"{self.prefix}{name}_norm.weight")
        if scale is not None:
            each = torch.stack([norm(e, scale, self.c) for e in each])
        return rotated(each, at, self.c["rope_theta"])

    def __call__(self, x: Tensor, at: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        query = self.part("q", x, at)
        found = []
        for head in range(self.c["num_attention_heads"]):
            of = head * self.c["num_key_value_heads"] // self.c["num_attention_heads"]
            keys, values = (torch.stack([entry[n][of] for entry in seen]) for n in (0, 1))
            share = torch.softmax(keys @ query[head] / math.sqrt(self.c["head_dim"]), 0)
            found.append(share @ values)
        return self.w[f"{self.prefix}o_proj.weight"] @ torch.cat(found)


def fed_forward(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up = (w[f"{prefix}{n}_proj.weight"] @ x for n in ("gate", "up"))
    return w[f"{prefix}down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def norm(x: Tensor, weight: Tensor, c: dict[str, Any]) -> Tensor:
    return x / torch.sqrt((x * x).mean() + c["rms_norm_eps"]) * weight


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """[heads, d]: feature j turns with feature j + d/2, by angles in float32 as checkpoints were trained."""
    half = x.shape[1] // 2
    speed = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angle = (float(position) * speed).double()
    left, right = x[:, :half], x[:, half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], 1)


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
