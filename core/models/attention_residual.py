"""`AttentionResidual` and `ResidualLayer`: layers that attend to what earlier blocks of layers have said.

Kimi Team, "Attention residuals" as Kimi K3 has them: every `attn_res_block_size` layers the running sum is
banked as a block and started anew; what a sub-layer reads is a mix of the banked blocks and the running sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.models.decoder import DecoderLayer

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts

_BANKED = "banked blocks"


class AttentionResidual:
    """Per token, a softmax over the banked blocks and the running sum of a learnt score, proj(RMSNorm(.))."""

    def __init__(self, name: str, a: Architecture, source: Checkpoint, parts: ModelParts) -> None:
        """`name`: "model.layers.0.mlp_res"."""
        self.norm, self.eps = parts.kernels.rms_norm, float(a.config["rms_norm_eps"])
        self.weight = source.take(f"{name}_norm.weight")
        self.score = source.take(f"{name}_proj.weight")[0]

    def __call__(self, running: Tensor, blocks: list[Tensor]) -> Tensor:
        """The running sum [N, H] and the banked blocks, alike -> the mix [N, H]."""
        if not blocks:
            return running
        wide = torch.promote_types(running.dtype, torch.float32)
        values = [*blocks, running]
        scores = [self.norm(v, self.weight, self.eps).to(wide) @ self.score.to(wide) for v in values]
        shares = torch.softmax(torch.stack(scores, -1), -1)
        mix = values[0].to(wide) * shares[:, :1]
        for i in range(1, len(values)):
            mix.addcmul_(values[i].to(wide), shares[:, i : i + 1])
        return mix.to(running.dtype)


class ResidualLayer(DecoderLayer):
    """A decoder layer whose parts read mixes. The blocks lie in `Rows.shared` while a step runs."""

    def __init__(
        self,
        index: int,
        mixer: Any,
        feed_forward: Any,
        a: Architecture,
        source: Checkpoint,
        parts: ModelParts,
    ) -> None:
        super().__init__(index, mixer, feed_forward, a, source, parts)
        prefix = f"model.layers.{index}."
        self.before_mixer = AttentionResidual(f"{prefix}self_attention_res", a, source, parts)
        self.before_feed_forward = AttentionResidual(f"{prefix}mlp_res", a, source, parts)
        self.size = int(a.config["attn_res_block_size"])

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """The running sum [N, H] -> the running sum behind this layer."""
        if self.index == 0:
            rows.shared[_BANKED] = []
        mix, banks = self.before_mixer(hidden, self._before(rows)), self.index % self.size == 0
        if banks:
            rows.shared[_BANKED].append(hidden)
        update = self.mixer(self.norm(mix, self.input_norm, self.eps), rows)
        hidden = update if banks else hidden + update
        mix = self.before_feed_forward(hidden, banked(rows))
        out: Tensor = hidden + self.feed_forward(self.norm(mix, self.post_norm, self.eps))
        return out

    def fill(self, hidden: Tensor, rows: Rows) -> None:
        """See `DecoderLayer`. The rows have been through the layers before this one at least."""
        mix = self.before_mixer(hidden, self._before(rows))
        self.mixer.fill(self.norm(mix, self.input_norm, self.eps), rows)

    def _before(self, rows: Rows) -> list[Tensor]:
        return banked(rows)[: -(-self.index // self.size)]


def banked(rows: Rows) -> list[Tensor]:
    """[N, H] of every block that is closed."""
    blocks: list[Tensor] = rows.shared[_BANKED]
    return blocks
