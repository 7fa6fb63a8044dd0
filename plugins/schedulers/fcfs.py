"""First come, first served: decodes first, then prompts in order of arrival, in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Annotated

import msgspec

from bien.core.api import PlanItem, Provider, SchedulerView, Sequence, Status, StepPlan, hookimpl


class FcfsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`token_budget`: most tokens computed in a step (it bounds the step's length, and so the gaps between
    tokens of those that decode). `max_running`: most sequences with KV (0: as many as there are slots)."""

    token_budget: Annotated[int, msgspec.Meta(ge=1)] = 512
    max_running: Annotated[int, msgspec.Meta(ge=0)] = 0


class Fcfs:
    """Chunked prefill under a token budget; the youngest running sequence is the victim."""

    def __init__(self, config: FcfsConfig) -> None:
        self._budget = config.token_budget
        self._limit = config.max_running or 1 << 30
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.stationary = False

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def plan(self, view: SchedulerView) -> StepPlan:
        plan = StepPlan()
        budget = self._budget
        shortage = False
        # A prompt's chunks stand behind all decodes: they may wait, a reader may not.
        for prefill in (False, True):
            for s in list(self._running):
                if budget <= 0 or s.status is not Status.RUNNING or (s.pending > 1) is not prefill:
                    continue
                tokens, drafts = self._size(view, s, budget)
                if tokens <= 0:
                    continue
                if not view.reserve(s, tokens + drafts):
                    shortage = True
                    if not self._make_room(view, s, tokens + drafts, plan):
                        continue
                plan.items.append(PlanItem(s, tokens + drafts, drafts))
                budget -= tokens + drafts
        while self._waiting and budget > 0 and not shortage and len(self._running) < self._limit:
            s = self._waiting[0]
            if not view.admit(s):
                break
            self._running.append(self._waiting.popleft())
            tokens, drafts = self._size(view, s, budget)
            if tokens > 0 and view.reserve(s, tokens + drafts):
                plan.items.append(PlanItem(s, tokens + drafts, drafts))
                budget -= tokens + drafts
        self.stationary = (
            len(plan.items) == len(self._running)
            and all(i.tokens == 1 and i.sequence.pending == 1 for i in plan.items)
            and budget > 0
            and not shortage
        )
        return plan

    def note(self, elapsed: float, tokens: int) -> None:
        pass

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _size(self, view: SchedulerView, s: Sequence, budget: int) -> tuple[int, int]:
        pending = s.pending
        if pending <= 0:
            return 0, 0
        tokens = view.chunk(s, min(pending, budget))
        drafts = min(s.drafts, budget - tokens) if tokens == pending else 0
        return tokens, drafts

    def _make_room(self, view: SchedulerView, s: Sequence, tokens: int, plan: StepPlan) -> bool:
        """Preempt from the youngest on, until `tokens` fit or `s` itself had to go."""
        planned = {id(i.sequence) for i in plan.items}
        for victim in reversed(self._running[:]):
            if victim.status is not Status.RUNNING:
                continue
            if id(victim) in planned:
                plan.items = [i for i in plan.items if i.sequence is not victim]
            view.preempt(victim)
            self._running.remove(victim)
            self._waiting.appendleft(victim)
            if victim is s:
                return False
            if view.reserve(s, tokens):
                return True
        return False


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "scheduler",
            "fcfs",
            lambda config, ctx: Fcfs(config),
            FcfsConfig,
            summary="first come, first served; chunked prefill; youngest is preempted",
        )
    ]
