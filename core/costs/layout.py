"""`Layout`: how one engine's model lies on its accelerators."""

from __future__ import annotations

from typing import Annotated

import msgspec

from bien.core.architectures.base import Architecture
from bien.core.errors import UserError
from bien.core.kv.groups import GroupKind

Count = Annotated[int, msgspec.Meta(ge=1)]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tensor` x `data` attention ranks per pipeline stage; experts on the same accelerators, cut
    `expert_tensor` ways and spread over `expert` of them: tensor * data = expert * expert_tensor."""

    tensor: Count = 1
    data: Count = 1  # attention data parallel: each rank has its own sequences and KV
    pipeline: Count = 1
    expert: Count = 1
    expert_tensor: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0: what follows from the others

    @property
    def stage(self) -> int:
        """Accelerators of one pipeline stage."""
        return self.tensor * self.data

    @property
    def devices(self) -> int:
        return self.stage * self.pipeline

    @property
    def cut(self) -> int:
        """Ways that one expert is cut."""
        return self.expert_tensor or max(1, self.stage // self.expert)

    def check(self, a: Architecture) -> None:
        """UserError, with the numbers, for a layout that the model cannot have."""
        heads = a.heads
        if heads % self.tensor:
            raise UserError(
                f"{a.model!r}: {heads} heads cannot be cut {self.tensor} ways; valid: a divisor of {heads}",
                field="tensor",
            )
        if self.pipeline > a.layers:
            raise UserError(
                f"{a.model!r}: {a.layers} layers cannot fill {self.pipeline} stages", field="pipeline"
            )
        routed = max((w.copies for w in a.weights if w.role == "routed"), default=0)
        if self.expert > 1 and not routed:
            raise UserError(f"{a.model!r} has no experts; valid: expert = 1", field="expert")
        if routed and (routed % self.expert or self.expert * self.cut != self.stage):
            raise UserError(
                f"{a.model!r}: {routed} experts on {self.expert} x {self.cut} parts do not fit a stage of "
                f"{self.tensor} x {self.data} accelerators; valid: expert * expert_tensor = tensor * data, "
                f"expert a divisor of {routed}",
                field="expert",
            )

    def kv_share(self, a: Architecture, kind: GroupKind) -> float:
        """The part of a group's entries, per sequence, that one accelerator of its attention rank holds."""
        if kind in (GroupKind.LATENT, GroupKind.INDEXER, GroupKind.COMPRESSED):
            return 1 / self.pipeline  # one latent for all heads: every tensor rank has it whole
        if kind is GroupKind.STATE:
            return 1 / (self.tensor * self.pipeline)
        return 1 / (min(self.tensor, a.kv_heads) * self.pipeline)
