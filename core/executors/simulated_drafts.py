"""`SimulatedDrafts`: how many drafts a simulated step accepts, and how many it proposes."""

from __future__ import annotations

import numpy as np

from bien.core.plan import I32, ExecutorPlan, NewSequence
from bien.core.providers import Context
from bien.core.sampling.acceptance import forced_lengths


class SimulatedDrafts:
    """Forced acceptance, by the counter-based noise of each sequence: the same as in a real engine."""

    def __init__(self, count: int, chances: tuple[float, ...]) -> None:
        self.count = count
        self._chances = chances
        self._slots: dict[int, tuple[int, int, int, bool]] = {}  # seed, choice, prompt, speculates

    @classmethod
    def of(cls, ctx: Context) -> SimulatedDrafts | None:
        """Of the pool's speculator, if it is one that drafts in simulations."""
        drafter = ctx.parts.get("speculator")
        if drafter is None or not getattr(drafter, "simulated", False):
            return None
        return cls(drafter.caps.max_drafts, ctx.speculation.acceptance)

    def enter(self, new: NewSequence) -> None:
        self._slots[new.slot] = new.seed, new.sampling.choice, new.prompt_tokens, new.max_drafts > 0

    def accepted(self, plan: ExecutorPlan) -> I32:
        """[R], as `StepResult.accepted`."""
        if not plan.drafts.any():
            return plan.samples
        known = [self._slots[slot] for slot in plan.slots.tolist()]
        seeds = np.array([k[0] for k in known], np.uint64)
        choices, prompts = np.array([k[1] for k in known]), np.array([k[2] for k in known])
        first = plan.starts + plan.counts - plan.drafts - prompts
        lengths = forced_lengths(self._chances, seeds, first, choices, plan.drafts)
        return (plan.samples * (1 + lengths)).astype(np.int32)

    def proposed(self, plan: ExecutorPlan) -> I32:
        """[R], as `StepResult.proposed`."""
        drafting = [self.count * self._slots[slot][3] for slot in plan.slots.tolist()]
        return (plan.samples * np.array(drafting, np.int32)).astype(np.int32)
