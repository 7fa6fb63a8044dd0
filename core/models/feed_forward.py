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
    ) -> None:
        """`prefix`: of the checkpoint's names, "model.layers.0.mlp."."""
        self.collect = parts.strategy.collect
        self.activation = activation or parts.kernels.silu_mul

        def load(name: str) -> Tensor:
            full = prefix + name
            return source.take(full, parts.strategy.shard(full, tuple(source.shape(full))))

        make = parts.quantizer.linear
        fused = torch.cat([load("gate_proj.weight"), load("up_proj.weight")])
        fused_bias = torch.cat([load("gate_proj.bias"), load("up_proj.bias")]) if bias else None
        self.gate_up = make(prefix + "gate_up_proj", fused, fused_bias)
        down_bias = own_bias(load("down_proj.bias")) if bias else None
        self.down = make(prefix + "down_proj", load("down_proj.weight"), down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, width]."""
        return self.collect(self.part(x), "mlp_out")

    def part(self, x: Tensor) -> Tensor:
        """This rank's term of the sum over ranks that the output is."""
        return self.down(self.activation(self.gate_up(x)))


def own_bias(bias: Tensor) -> Tensor | None:
    """What a rank adds behind a product that is summed over ranks: one of them has the bias."""
    return bias if len(bias) else None
