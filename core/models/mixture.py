"""Mixture of experts: a router that chooses, experts that compute what is routed to them, a shared one.

Only chosen experts are computed and read: a decoded token costs its active parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.models.feed_forward import NAMES, Activation, FeedForward

if TYPE_CHECKING:
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts
    from bien.core.quantization.quantizer import Quantizer, StackedMethod


class Router(Protocol):
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] -> (experts [N, K] int64, their weights [N, K] in x's dtype)."""
        ...


class SoftmaxRouter:
    """The K largest of a softmax over all experts; with `renormalize` their weights sum to one."""

    def __init__(self, weight: Tensor, count: int, *, renormalize: bool, bias: Tensor | None = None) -> None:
        """weight: [experts, H]; bias: [experts]."""
        self._weight, self._bias, self._count, self._renormalize = weight, bias, count, renormalize

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self._weight, self._bias)
        if self._renormalize:  # a softmax of the chosen ones is just that
            best, chosen = scores.topk(self._count, -1)
            return chosen, torch.softmax(best, -1, dtype=_wide(x)).to(x.dtype)
        weights, chosen = torch.softmax(scores, -1, dtype=_wide(x)).topk(self._count, -1)
        return chosen, weights.to(x.dtype)


class SigmoidRouter:
    """DeepSeek-V3's "noaux_tc": sigmoid scores, chosen with a bias that balances the load and does not weigh.

    With several groups of experts only the `kept_groups` ones with the largest sums of their two best are
    looked at. Scores are computed in float32 at least.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        count: int,
        *,
        groups: int = 1,
        kept_groups: int = 1,
        renormalize: bool = True,
        scale: float = 1.0,
    ) -> None:
        """weight: [experts, H]; bias: [experts]."""
        self._weight, self._bias, self._count = weight, bias, count
        self._groups, self._kept, self._renormalize, self._scale = groups, kept_groups, renormalize, scale

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = _wide(x)
        scores = torch.sigmoid(F.linear(x.to(wide), self._weight.to(wide)))
        wish = scores + self._bias.to(wide)
        if self._groups > 1:
            grouped = wish.view(len(x), self._groups, -1)
            best = grouped.topk(2, -1).values.sum(-1).topk(self._kept, -1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            wish = grouped.masked_fill(~kept[..., None], float("-inf")).view_as(wish)
        chosen = wish.topk(self._count, -1).indices
        weights = scores.gather(1, chosen)
        if self._renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, (weights * self._scale).to(x.dtype)


class Experts:
    """Gated feed-forward layers [N, width] -> [N, width], each over the tokens that are routed to it."""

    def __init__(self, layers: list[FeedForward], quantizer: Quantizer | None = None) -> None:
        """`quantizer`: that made the layers' products; it may have one for those of all experts."""
        self._layers, self._stacked = layers, _stack(layers, quantizer)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum over a token's chosen experts of weight times output; of every rank its term."""
        if len(x) == 1:
            outputs = torch.cat([self._layers[e].part(x) for e in chosen[0].tolist()])
            return weights @ outputs
        # Tokens in order of their experts: each expert has one run of rows.
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        token = order // chosen.shape[1]
        run = self._loop if self._stacked is None else self._grouped
        outputs = run(x[token], flat[order])
        outputs.mul_(weights.flatten()[order][:, None])
        return torch.zeros_like(x).index_add_(0, token, outputs)

    def _loop(self, rows: Tensor, expert: Tensor) -> Tensor:
        counts = np.bincount(expert.cpu().numpy(), minlength=len(self._layers))
        outputs, at = torch.empty_like(rows), 0
        for e in np.flatnonzero(counts).tolist():
            n = int(counts[e])
            outputs[at : at + n] = self._layers[e].part(rows[at : at + n])
            at += n
        return outputs

    def _grouped(self, rows: Tensor, expert: Tensor) -> Tensor:
        assert self._stacked is not None
        gate_up, down = self._stacked
        ends = torch.bincount(expert, minlength=len(self._layers)).cumsum(0, dtype=torch.int32)
        return down(self._layers[0].activation(gate_up(rows, ends, expert)), ends, expert)


def _stack(
    layers: list[FeedForward], quantizer: Quantizer | None
) -> tuple[StackedMethod, StackedMethod] | None:
    stack = getattr(quantizer, "stack", None)
    if stack is None:
        return None
    gate_up, down = stack([x.gate_up for x in layers]), stack([x.down for x in layers])
    return None if gate_up is None or down is None else (gate_up, down)


class Mixture:
    """Routed experts plus, for every token, a shared feed-forward layer if there is one."""

    def __init__(
        self, router: Router, experts: Experts, parts: ModelParts, shared: FeedForward | None = None
    ) -> None:
        self.router, self.experts, self.shared = router, experts, shared
        self.collect = parts.strategy.collect

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        out = self.experts(x, *self.router(x))
        if self.shared is not None:
            out += self.shared.part(x)
        return self.collect(out, "mlp_out")


def load_experts(
    prefix: str,
    count: int,
    source: Checkpoint,
    parts: ModelParts,
    activation: Activation | None = None,
    names: tuple[str, str, str] = NAMES,
    bias: bool = False,
) -> Experts:
    """`prefix`: "model.layers.0.mlp.experts."; expert i's projections are `names` behind "<prefix>i."."""
    return Experts(
        [
            FeedForward(f"{prefix}{i}.", source, parts, bias=bias, activation=activation, names=names)
            for i in range(count)
        ],
        parts.quantizer,
    )


class LatentExperts(Experts):
    """Experts in a narrower space: x is brought into it once, and the sum of the outputs back, behind a norm
    if there is one (Kimi K3)."""

    def __init__(
        self, prefix: str, within: Experts, source: Checkpoint, parts: ModelParts, eps: float
    ) -> None:
        """`prefix`: "model.layers.0.block_sparse_moe."; `within`: experts of the narrower width."""
        make, (down, up) = parts.quantizer.linear, (f"{prefix}routed_expert_{n}_proj" for n in ("down", "up"))
        self._within, self._eps, self._rms_norm = within, eps, parts.kernels.rms_norm
        self._down = make(down, source.take(f"{down}.weight"), None)
        self._up = make(up, source.take(f"{up}.weight"), None)
        norm = f"{prefix}routed_expert_norm.weight"
        self._norm = source.take(norm) if norm in source else None

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = self._within(self._down(x), chosen, weights)
        if self._norm is not None:
            out = self._rms_norm(out, self._norm, self._eps)
        return self._up(out)


def load_sigmoid_mixture(
    prefix: str,
    fields: Mapping[str, Any],
    source: Checkpoint,
    parts: ModelParts,
    *,
    activation: Activation | None = None,
    experts: Experts | None = None,
) -> Mixture:
    """What `sigmoid_mixture` declares; `fields` as DeepSeek-V3's config.json names them. `experts`: in place
    of the usual ones."""
    router = SigmoidRouter(
        source.take(f"{prefix}gate.weight", wide=True),
        source.take(f"{prefix}gate.e_score_correction_bias", wide=True),
        fields["num_experts_per_tok"],
        groups=fields["n_group"],
        kept_groups=fields["topk_group"],
        renormalize=fields["norm_topk_prob"],
        scale=fields["routed_scaling_factor"],
    )
    if experts is None:
        experts = load_experts(f"{prefix}experts.", fields["n_routed_experts"], source, parts, activation)
    shared = None
    if fields["n_shared_experts"]:
        shared = FeedForward(f"{prefix}shared_experts.", source, parts, activation=activation)
    return Mixture(router, experts, parts, shared)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
