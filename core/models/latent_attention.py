"""`LatentAttention` (MLA) and its `Indexer` (DSA): DeepSeek-V2, V3, V3.2; GLM-5; Kimi.

The cache holds one latent per position for all heads. Queries are brought into the latent space (the
"absorbed" form), in decoding and in prefill alike, so that a cached prefix is used as it lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.architectures.base import Architecture
from bien.core.models.rotary import paired, rotary
from bien.core.quantization.quantizer import LinearMethod

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts

INDEXER = "indexer"  # name of the KV group of indexer keys
_CHOSEN = "chosen positions"


class LatentAttention:
    """Multi-head latent attention.

    Config fields of the architecture: q_lora_rank (None: queries straight from the hidden state),
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, `rope` (None: nothing is rotated, though
    the features exist), `rope_interleave`, `attention_scale`, `latent_norm_eps` (absent: `rms_norm_eps`),
    `output_gate` (sigmoid(g_proj x) on the heads).
    """

    def __init__(
        self,
        prefix: str,
        layer: int,
        a: Architecture,
        source: Checkpoint,
        parts: ModelParts,
        indexer: Indexer | None = None,
        *,
        sparse: bool = False,
    ) -> None:
        """`prefix`: "model.layers.0.self_attn.". `sparse`: attend to what `indexer`, or the last layer that
        has one, has chosen."""
        c = a.config
        self.layer, self.kernels, self.collect = layer, parts.kernels, parts.strategy.collect
        self.heads, self.rank = a.heads, c["kv_lora_rank"]
        self.nope, self.rope, self.value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.eps = float(c.get("latent_norm_eps") or c["rms_norm_eps"])
        self.scale = c["attention_scale"]
        self.rotary = None if c["rope"] is None else rotary(c["rope"], self.rope, parts)
        self.indexer, self.sparse = indexer, sparse
        bias = bool(c.get("attention_bias"))
        interleaved = bool(c.get("rope_interleave"))

        def linear(name: str, weight: Tensor, *, biased: bool = False, turn: int = 0) -> LinearMethod:
            b = source.take(f"{prefix}{name}.bias") if biased else None
            if b is not None and turn:
                b = self._laid_out(b, turn, interleaved)
            return parts.quantizer.linear(prefix + name, weight, b)

        per_head = self.nope + self.rope
        self.q_a: LinearMethod | None = None
        if c["q_lora_rank"] is None:
            q = source.take(f"{prefix}q_proj.weight")
            self.q = linear("q_proj", self._laid_out(q, per_head, interleaved))
        else:
            self.q_a = linear("q_a_proj", source.take(f"{prefix}q_a_proj.weight"), biased=bias)
            self.q_norm = source.take(f"{prefix}q_a_layernorm.weight")
            q = source.take(f"{prefix}q_b_proj.weight")
            self.q = linear("q_b_proj", self._laid_out(q, per_head, interleaved))
        width = self.rank + self.rope
        kv = source.take(f"{prefix}kv_a_proj_with_mqa.weight")
        self.kv_a = linear(
            "kv_a_proj_with_mqa", self._laid_out(kv, width, interleaved), biased=bias, turn=width
        )
        self.kv_norm = source.take(f"{prefix}kv_a_layernorm.weight")
        both = source.take(f"{prefix}kv_b_proj.weight").view(self.heads, self.nope + self.value, self.rank)
        self.into = both[:, : self.nope].contiguous()  # [heads, nope, rank]: queries into the latent space
        self.out_of = both[:, self.nope :].transpose(1, 2).contiguous()  # [heads, rank, value]
        self.gate: LinearMethod | None = None
        if c.get("output_gate"):
            self.gate = parts.quantizer.linear(prefix + "g_proj", source.take(f"{prefix}g_proj.weight"), None)
        self.out = linear("o_proj", source.take(f"{prefix}o_proj.weight"), biased=bias)

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """Normed hidden [N, H] -> [N, H]. Writes the tokens' latents (and indexer keys), then attends."""
        latent = self._latent(x, rows)
        rows.write(self.layer, latent)
        low = x
        if self.q_a is not None:
            low = self.kernels.rms_norm(self.q_a(x), self.q_norm, self.eps)
        query = self.q(low).view(-1, self.heads, self.nope + self.rope)
        if self.rotary is not None:
            self.kernels.rope(query[..., self.nope :], self.rotary.angles(rows, x.dtype))
        absorbed = torch.einsum("nhd,hdr->nhr", query[..., : self.nope], self.into)
        query = torch.cat([absorbed, query[..., self.nope :]], -1)
        chosen = None
        if self.sparse:
            if self.indexer is not None:
                rows.shared[_CHOSEN] = self.indexer(x, low, rows)
            chosen = rows.shared[_CHOSEN]
        mixed = rows.attend_latent(self.layer, query, self.scale, self.rank, chosen)
        heads = torch.einsum("nhr,hrv->nhv", mixed, self.out_of).flatten(1)
        if self.gate is not None:
            heads = heads * torch.sigmoid(self.gate(x))
        return self.collect(self.out(heads), "attention_out")

    def fill(self, x: Tensor, rows: Rows) -> None:
        """Write the tokens' latents and indexer keys, and nothing else (drafters that share this layer)."""
        rows.write(self.layer, self._latent(x, rows))
        if self.indexer is not None:
            self.indexer.fill(x, rows)

    def _latent(self, x: Tensor, rows: Rows) -> Tensor:
        latent = self.kv_a(x)
        latent[:, : self.rank] = self.kernels.rms_norm(
            latent[:, : self.rank].contiguous(), self.kv_norm, self.eps
        )
        if self.rotary is not None:
            self.kernels.rope(latent[:, None, self.rank :], self.rotary.angles(rows, x.dtype))
        return latent

    def _laid_out(self, weight: Tensor, group: int, interleaved: bool) -> Tensor:
        # The rotated features are the last of every `group` rows; interleaved pairs are neighbours already.
        if interleaved or self.rotary is None:
            return weight
        heads = weight.view(-1, group, *weight.shape[1:])
        turned = heads[:, group - self.rope :]
        turned = paired(turned.flatten(0, 1), self.rope).view_as(turned)
        return torch.cat([heads[:, : group - self.rope], turned], 1).view(weight.shape)


class Indexer:
    """DeepSeek Sparse Attention's lightning indexer: narrow heads score every position, the best are attended
    to. Its first `qk_rope_head_dim` features are rotated.

    Config fields: index_n_heads, index_head_dim, index_topk, indexer_rope_interleave.
    """

    def __init__(
        self, prefix: str, layer: int, a: Architecture, source: Checkpoint, parts: ModelParts
    ) -> None:
        """`prefix`: "model.layers.0.self_attn.indexer."."""
        c = a.config
        self.layer, self.kernels = layer, parts.kernels
        self.heads, self.dim, self.count = c["index_n_heads"], c["index_head_dim"], c["index_topk"]
        self.rope = c["qk_rope_head_dim"]
        self.rotary = rotary(c["rope"], self.rope, parts)
        interleaved = bool(c.get("indexer_rope_interleave"))

        def laid_out(weight: Tensor) -> Tensor:
            if interleaved:
                return weight
            heads = weight.view(-1, self.dim, *weight.shape[1:])
            turned = paired(heads[:, : self.rope].flatten(0, 1), self.rope).view_as(heads[:, : self.rope])
            return torch.cat([turned, heads[:, self.rope :]], 1).view(weight.shape)

        # Small and decisive: never quantized.
        self.wq = laid_out(source.take(f"{prefix}wq_b.weight"))
        self.wk = laid_out(source.take(f"{prefix}wk.weight"))
        self.norm_weight = laid_out(source.take(f"{prefix}k_norm.weight"))
        self.norm_bias = laid_out(source.take(f"{prefix}k_norm.bias"))
        self.weights = source.take(f"{prefix}weights_proj.weight", wide=True)

    def __call__(self, x: Tensor, low: Tensor, rows: Rows) -> Tensor:
        """x: normed hidden [N, H]; low: the queries' latent [N, q_lora_rank] -> chosen positions
        [N, index_topk]. Writes the tokens' indexer keys."""
        self.fill(x, rows)
        query = F.linear(low, self.wq).view(-1, self.heads, self.dim)
        self.kernels.rope(query[..., : self.rope], self.rotary.angles(rows, x.dtype))
        # Published code divides by square roots of sizes, which changes no order.
        weights = F.linear(x.to(self.weights.dtype), self.weights)
        return rows.choose(self.layer, query, weights, self.count, INDEXER)

    def fill(self, x: Tensor, rows: Rows) -> None:
        """Write the tokens' indexer keys."""
        key = F.layer_norm(F.linear(x, self.wk), (self.dim,), self.norm_weight, self.norm_bias, 1e-6)
        self.kernels.rope(key[:, None, : self.rope], self.rotary.angles(rows, x.dtype))
        rows.write(self.layer, key, INDEXER)
