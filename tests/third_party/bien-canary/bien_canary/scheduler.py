"""Shortest first: the sequence with the fewest tokens left to compute goes first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from bien.core.api import Context, PlanItem, Provider, SchedulerView, Sequence, Status, StepPlan, hookimpl


class ShortestConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`token_budget`: most tokens computed in a step."""

    token_budget: Annotated[int, msgspec.Meta(ge=1)] = 256


class Shortest:
    stationary = False  # never promised

    def __init__(self, config: ShortestConfig) -> None:
        self._budget = config.token_budget
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)

    def plan(self, view: SchedulerView) -> StepPlan:
        plan = StepPlan()
        if not self._fill(view, plan, self._running):
            new = []
            self._waiting.sort(key=_left)
            while self._waiting and view.admit(self._waiting[0]):
                new.append(self._waiting.pop(0))
            self._running += new
            self._fill(view, plan, new)
        return plan

    def note(self, elapsed: float, tokens: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _fill(self, view: SchedulerView, plan: StepPlan, sequences: list[Sequence]) -> bool:
        """Plan `sequences`, shortest first. True: memory was short, and the longest had to give way."""
        todo = sorted(sequences, key=_left)
        preempted = False
        while todo:
            s = todo.pop(0)
            kept = sum(t.status is Status.RUNNING and t.pending == 1 for t in todo)
            item = self._item(view, s, self._budget - sum(i.tokens for i in plan.items), kept)
            if item is None:
                continue
            while not view.reserve(s, item.tokens):
                if not todo:
                    break
                victim = todo.pop()
                if victim.status is Status.RUNNING:
                    view.preempt(victim)
                    self._running.remove(victim)
                    self._waiting.append(victim)
                    preempted = True
            else:
                plan.items.append(item)
        return preempted

    def _item(self, view: SchedulerView, s: Sequence, left: int, kept: int) -> PlanItem | None:
        """`kept`: of the `left` tokens, for those that decode and come later."""
        most = left if s.pending == 1 else left - kept
        if s.status is not Status.RUNNING or s.pending < 1 or most < 1:
            return None
        new = view.chunk(s, min(s.pending, most))
        drafts = min(s.drafts, max(0, left - new - kept)) if new == s.pending else 0
        return PlanItem(s, new + drafts, drafts)


def _left(s: Sequence) -> tuple[int, int]:
    return s.pending + max(0, s.remaining), s.order


def _make(config: ShortestConfig, ctx: Context) -> Shortest:
    return Shortest(config)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    yield Provider("scheduler", "canary-shortest", _make, ShortestConfig, summary="shortest first")
