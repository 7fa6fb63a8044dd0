"""What the built-in schedulers share: chunked prefill under a token budget, along a total order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import dataclass, field

from bien.core.api import PlanItem, SchedulerView, Sequence, Status, StepPlan

Rank = tuple[float, int]


@dataclass(slots=True)
class _Step:
    """One plan in the making."""

    budget: int  # tokens that may still be planned
    plan: StepPlan = field(default_factory=StepPlan)
    short: bool = False  # memory did not suffice for those that run
    settled: bool = True  # False: with nothing new, the next plan will be another all the same
    victims: set[Sequence] = field(default_factory=set)

    def add(self, s: Sequence, tokens: int, drafts: int) -> None:
        self.plan.items.append(PlanItem(s, tokens + drafts, drafts))
        self.budget -= tokens + drafts

    def drop(self, s: Sequence) -> None:
        for item in self.plan.items:
            if item.sequence is s:
                self.plan.items.remove(item)
                self.budget += item.tokens
                return


class Chunked(ABC):
    """Decodes first, then prompts in chunks, both in the order of `rank`; whoever ranks last is the victim.
    Drafts get what is left once each that decodes has its token, before prompts do.

    Admission is strictly in order: who cannot be admitted holds up all behind it, so that small prompts do
    not starve a large one.
    """

    def __init__(self, token_budget: int, max_running: int) -> None:
        self._budget = token_budget
        self._limit = max_running or 1 << 30
        self._waiting: list[Sequence] = []  # both by rank
        self._running: list[Sequence] = []
        self.stationary = False

    @abstractmethod
    def rank(self, s: Sequence) -> Rank:
        """Smaller goes first. It must never change, and no two sequences may have the same."""

    def yields(self, victim: Sequence, s: Sequence) -> bool:
        """Whether running `victim`, which ranks behind waiting `s`, is preempted to admit `s`."""
        return False

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=self.rank)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
                return

    def plan(self, view: SchedulerView) -> StepPlan:
        step = _Step(self._budget)
        # A prompt's chunks stand behind all decodes: they may wait, a reader may not.
        decoding = [s for s in self._running if s.status is Status.RUNNING and s.pending == 1]
        # Drafts are a bet, prompts are work: half of what decodes leave is theirs, if there are any.
        others = len(decoding) < len(self._running) or (self._waiting and len(self._running) < self._limit)
        spare = max(0, step.budget - len(decoding)) // 2 if others else 0
        for behind, s in zip(range(len(decoding) - 1, -1, -1), decoding, strict=True):
            if step.budget > 0 and s.status is Status.RUNNING:
                self._advance(view, s, step, behind + spare)
        self._prompts(view, step)
        self.stationary = step.budget > 0 and step.settled and self._repeats(step.plan.items)
        return step.plan

    def note(self, elapsed: float, tokens: int) -> None:
        return  # the order asks for no measurement

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _repeats(self, items: list[PlanItem]) -> bool:
        """Whether all that run decode."""
        if len(items) != len(self._running):
            return False
        for item, s in zip(items, self._running, strict=True):
            if item.sequence is not s or item.tokens != 1 or s.pending != 1:
                return False
        return True

    def _prompts(self, view: SchedulerView, step: _Step) -> None:
        """Chunks of running prompts, and admissions, merged by rank."""
        prompts = [s for s in self._running if s.status is Status.RUNNING and s.pending > 1]
        prompts.reverse()
        blocked = False
        while step.budget > 0:
            # Memory that was short a moment ago is not for newcomers.
            head = self._waiting[0] if self._waiting and not blocked and not step.short else None
            if head and (not prompts or self.rank(head) < self.rank(prompts[-1])):
                if head in step.victims or not self._admit(view, head, step):
                    blocked = True
                    continue
                self._waiting.remove(head)
                insort(self._running, head, key=self.rank)
                tokens, drafts = self._size(view, head, step.budget)
                if tokens > 0 and view.reserve(head, tokens + drafts):
                    step.add(head, tokens, drafts)
            elif prompts:
                s = prompts.pop()
                if s.status is Status.RUNNING:
                    self._advance(view, s, step)
            else:
                return

    def _admit(self, view: SchedulerView, s: Sequence, step: _Step) -> bool:
        """One victim at a time: admission that fails for a moment only must not empty the engine."""
        if len(self._running) < self._limit and view.admit(s):
            return True
        if s.promised:  # waits for its own last token, which no victim brings
            step.settled = False
            return False
        for victim in reversed(self._running):
            if self.rank(victim) < self.rank(s):
                return False
            if victim.status is Status.RUNNING and self.yields(victim, s):
                self._preempt(view, victim, step)
                return len(self._running) < self._limit and view.admit(s)
        return False

    def _advance(self, view: SchedulerView, s: Sequence, step: _Step, behind: int = 0) -> None:
        tokens, drafts = self._size(view, s, step.budget, behind)
        if tokens <= 0:
            return
        if view.reserve(s, tokens + drafts) or self._make_room(view, s, tokens + drafts, step):
            step.add(s, tokens, drafts)

    def _size(self, view: SchedulerView, s: Sequence, budget: int, behind: int = 0) -> tuple[int, int]:
        # `behind`: tokens of those that go before its drafts.
        pending = s.pending
        if pending <= 0:
            return 0, 0
        tokens = view.chunk(s, min(pending, budget))
        drafts = min(s.drafts, max(0, budget - tokens - behind)) if tokens == pending else 0
        return tokens, drafts

    def _make_room(self, view: SchedulerView, s: Sequence, tokens: int, step: _Step) -> bool:
        """Preempt from the last on, until `tokens` fit or `s` itself had to go."""
        step.short, step.settled = True, False
        for victim in reversed(self._running[:]):
            if victim.status is not Status.RUNNING:
                continue
            self._preempt(view, victim, step)
            if victim is s:
                return False
            if view.reserve(s, tokens):
                return True
        return False

    def _preempt(self, view: SchedulerView, victim: Sequence, step: _Step) -> None:
        step.settled = False
        step.victims.add(victim)
        step.drop(victim)
        view.preempt(victim)
        self._running.remove(victim)
        insort(self._waiting, victim, key=self.rank)
