"""`SimulatedDrafts`: how many drafts a simulated step accepts, and how many it proposes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bien.core.plan import I32, ExecutorPlan, NewSequence, i32
from bien.core.providers import Context
from bien.core.sampling.acceptance import forced_lengths

AHEAD = 256  # positions whose lengths are drawn at a time: one by one they cost more than all else in a step


@dataclass(slots=True)
class _Slot:
    seed: int
    choice: int
    prompt: int
    drafts: int  # of a round
    first: int = 0  # position of the first of `lengths`
    lengths: NDArray[np.int64] | None = None


class SimulatedDrafts:
    """Forced acceptance, by the counter-based noise of each sequence: the same as in a real engine."""

    def __init__(self, count: int, chances: tuple[float, ...]) -> None:
        self.count = count
        self._chances = chances
        self._slots: dict[int, _Slot] = {}

    @classmethod
    def of(cls, ctx: Context) -> SimulatedDrafts | None:
        """Of the pool's speculator, if it is one that drafts in simulations."""
        drafter = ctx.parts.get("speculator")
        if drafter is None or not getattr(drafter, "simulated", False):
            return None
        return cls(drafter.caps.max_drafts, ctx.speculation.acceptance)

    def enter(self, new: NewSequence) -> None:
        drafts = min(self.count, new.max_drafts)
        self._slots[new.slot] = _Slot(new.seed, new.sampling.choice, new.prompt_tokens, drafts)

    def accepted(self, plan: ExecutorPlan) -> I32:
        """[R], as `StepResult.accepted`."""
        drafts = plan.drafts.tolist()
        if not any(drafts):
            return plan.samples
        gained = plan.samples.tolist()
        ends = (plan.starts + plan.counts).tolist()
        for i, (slot, n) in enumerate(zip(plan.slots.tolist(), drafts, strict=True)):
            if n:
                gained[i] += min(n, self._length(self._slots[slot], ends[i] - n))
        return i32(gained)

    def proposed(self, plan: ExecutorPlan) -> I32:
        """[R], as `StepResult.proposed`."""
        rows = zip(plan.slots.tolist(), plan.samples.tolist(), strict=True)
        return i32([self._slots[slot].drafts if samples else 0 for slot, samples in rows])

    def _length(self, slot: _Slot, position: int) -> int:
        at = position - slot.prompt
        if slot.lengths is None or not 0 <= at - slot.first < AHEAD:
            slot.first = at
            positions = np.arange(at, at + AHEAD)
            slot.lengths = forced_lengths(
                self._chances, np.uint64(slot.seed), positions, slot.choice, np.full(AHEAD, self.count)
            )
        return int(slot.lengths[at - slot.first])
