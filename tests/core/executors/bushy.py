"""`Bushy`: a drafter of trees."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from bien.core.speculation.speculator import DeviceDraft, Drawer
from bien.plugins.speculators.early_exit import EarlyExit, EarlyExitConfig


class Bushy(EarlyExit):
    """At each level the second best and then the best token; levels go on below the best."""

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__(config)
        self.caps = msgspec.structs.replace(self.caps, topology="tree", max_drafts=2 * config.max_drafts)

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        seen: list[Tensor] = []

        class Both:
            def draw(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
                best = logits.topk(2, dim=-1).indices
                seen.extend((best[:, 1], best[:, 0]))
                return best[:, 0]

        super().propose(rows, last, -(-limit // 2), Both())
        parents = torch.tensor([j // 2 * 2 - 1 for j in range(limit)]).expand(len(last), -1)
        return DeviceDraft(torch.stack(seen[:limit], 1), None, parents)
