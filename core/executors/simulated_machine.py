"""The simulated executor of a machine: what its steps cost, what fits into it, how fast its tiers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.costs.memory import kv_groups, room
from bien.core.costs.step import StepModel
from bien.core.errors import UserError
from bien.core.executors.simulated import NoData, SimulatedExecutor
from bien.core.executors.simulated_drafts import SimulatedDrafts
from bien.core.kv.groups import KVGroup
from bien.core.plan import ExecutorPlan
from bien.core.providers import Context


class MachineCost:
    """The cost of plans by a `StepModel`, times `pace`."""

    def __init__(self, model: StepModel, pace: float = 1.0, drafter: Any = None) -> None:
        """`drafter`: one that drafts in simulations: `passes` of `layers` layers for its `max_drafts`."""
        self._model = model
        self._pace = pace
        self._drafter = drafter

    def __call__(self, plan: ExecutorPlan) -> float:
        rows = int(plan.samples.sum())
        seconds = self._model.seconds(plan.starts, plan.counts, rows + int(plan.drafts.sum()))
        if self._drafter is not None and rows:
            seconds += self._drafting(plan, rows)
        return self._pace * seconds

    def _drafting(self, plan: ExecutorPlan, rows: int) -> float:
        passes = self._drafter.passes
        each = -(-self._drafter.caps.max_drafts // passes)  # tokens of a sequence in a pass
        ends = (plan.starts + plan.counts)[plan.samples > 0]
        once = self._model.part(ends, np.full(rows, each, np.int32), rows * each, self._drafter.layers)
        return float(passes * once)

    def growing(self, plan: ExecutorPlan, steps: int) -> NDArray[Any]:
        """Of `plan`, whose rows all decode, and of the steps after it, each one position further."""
        seconds: NDArray[Any] = self._pace * self._model.growing(plan.starts, plan.rows, steps)
        return seconds


class MachineLinks(NoData):
    """`HostLink`: blocks are copied between accelerators and their host at the link's speed, each
    accelerator its part, all at a time. Attention ranks have different sequences: each is a lane."""

    def __init__(self, groups: Sequence[KVGroup], model: StepModel) -> None:
        layout = model.layout
        self.bytes_per_s = model.machine.host_link_gb_per_s * 1e9 * model.machine.efficiency.link
        self.lanes = layout.data
        self.shares = tuple(layout.kv_share(model.a, g.kind) for g in groups)  # that one accelerator copies


def machine_executor(ctx: Context, model: StepModel, limited: bool, pace: float = 1.0) -> SimulatedExecutor:
    """See `bien.core.api.machine_executor`."""
    groups = kv_groups(model, ctx.groups)
    if len(ctx.groups) != len(model.a.groups):
        raise UserError("executor 'simulated' has no cost for the KV groups of a drafter", field="speculator")
    drafts = SimulatedDrafts.of(ctx)
    cost = MachineCost(model, pace, ctx.parts.get("speculator") if drafts else None)
    return SimulatedExecutor(
        groups,
        cost,
        model.a.vocab_size,
        virtual=ctx.clock.virtual,
        growing=cost.growing,
        room=room(model, groups) if limited else None,
        io=MachineLinks(groups, model),
        drafts=drafts,
    )
