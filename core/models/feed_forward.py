"""`FeedForward`: the gated feed-forward layer, dense, shared, or one expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts

Activation = Callable[[Tensor], Tensor]
"""[N, 2 * width] = gate then up -> [N, width]. None in what follows: silu(gate) * up."""

NAMES = ("gate_proj", "up_proj", "down_proj")


class FeedForward:
    """down(activation(gate, up))."""

    def __init__(
        self,
        prefix: str,
        source: Checkpoint,
        parts: ModelParts,
        *,
        bias: bool = False,
        activation: Activation | None = None,
        names: tuple[str, str, str] = NAMES,
    ) -> None:
        """`prefix`: of the checkpoint's names, "model.layers.0.mlp."; `names`: what follows it there."""
        self.collect = parts.strategy.collect
        self.activation = activation or parts.kernels.silu_mul

        def load(name: str) -> Tensor:
            full = prefix + name
            return source.take(full, parts.strategy.shard(full, tuple(source.shape(full))))

        make, (gate, up, down) = parts.quantizer.linear, names
        fused = torch.cat([load(f"{gate}.weight"), load(f"{up}.weight")])
        fused_bias = torch.cat([load(f"{gate}.bias"), load(f"{up}.bias")]) if bias else None
        self.gate_up = make(prefix + "gate_up_proj", fused, fused_bias)
        down_bias = own_bias(load(f"{down}.bias")) if bias else None
        self.down = make(prefix + "down_proj", load(f"{down}.weight"), down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, width]."""
        return self.collect(self.part(x), "mlp_out")

    def part(self, x: Tensor) -> Tensor:
        """This rank's term of the sum over ranks that the output is."""
        return self.down(self.activation(self.gate_up(x)))


class SiTU:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta): silu(gate) * up with both
    factors bounded (Kimi K3). Computed in float32 at least."""

    def __init__(self, beta: float, linear_beta: float) -> None:
        self._beta, self._linear = beta, linear_beta

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
        bounded = self._beta * torch.tanh(gate / self._beta) * torch.sigmoid(gate)
        return (bounded * self._linear * torch.tanh(up / self._linear)).to(gate_up.dtype)


class ClampedSwiGLU:
    """gate sigmoid(alpha gate) * (up + 1), of a gate up to `limit` and an up between -limit and limit
    (gpt-oss)."""

    def __init__(self, alpha: float, limit: float) -> None:
        self._alpha, self._limit = alpha, limit

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return torch.sigmoid(gate * self._alpha).mul_(gate).mul_(up.add_(1))


def own_bias(bias: Tensor) -> Tensor | None:
    """What a rank adds behind a product that is summed over ranks: one of them has the bias."""
    return bias if len(bias) else None
