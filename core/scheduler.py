"""The scheduler contract: order, token budget, chunking and the choice of victims; no bookkeeping."""

from __future__ import annotations

from typing import Protocol

from bien.core.plan import StepPlan
from bien.core.sequence import Sequence


class SchedulerView(Protocol):
    """What the engine offers while a plan is made. Each call takes effect at once."""

    @property
    def now(self) -> float:
        """Clock seconds."""
        ...

    def admit(self, sequence: Sequence) -> bool:
        """Give a WAITING sequence a slot and its cached prefix. False: no slot or no memory now.

        After True the status is RUNNING, `pending` is exact, and the sequence must be planned, or
        kept as running, by the scheduler; or it is LOADING and becomes plannable in a later step.
        """
        ...

    def chunk(self, sequence: Sequence, tokens: int) -> int:
        """The largest legal chunk <= `tokens` of a RUNNING sequence (state snapshots may need chunks to end
        at a boundary, windows hold so many). 0: none before its steps in flight have ended."""
        ...

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve KV in every group for `tokens` more positions (drafts included). False: shortage."""
        ...

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and KV from a RUNNING sequence; it is WAITING again (recompute)."""
        ...


class Scheduler(Protocol):
    """Sees each sequence from `add` to `remove`. Called from one thread only."""

    def add(self, sequence: Sequence) -> None:
        """A sequence was submitted (status WAITING)."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """It finished or was aborted; it must never be planned again."""
        ...

    def plan(self, view: SchedulerView) -> StepPlan:
        """Decide one step. Every item must be RUNNING with reserved KV, appear once, and satisfy
        1 <= tokens - drafts <= pending and drafts <= sequence.drafts; drafts only when the whole of
        `pending` is planned, and only once each sequence that decodes (`pending` 1) has its token, unless its
        memory is short. A sequence with `pending` 0 must be left out; an item of no tokens (a chunk
        of 0) is as good as none. An empty plan: nothing to do."""
        ...

    def note(self, elapsed: float, tokens: int) -> None:
        """A planned step ended after `elapsed` seconds and `tokens` computed positions."""
        ...

    @property
    def stationary(self) -> bool:
        """True when, with no arrival, finish or shortage of blocks, the next plans would repeat the last
        one exactly; simulations then skip them in one jump."""
        ...

    def close(self) -> None: ...
