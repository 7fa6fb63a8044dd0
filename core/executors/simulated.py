"""The simulated executor: a step costs what a cost function says; tokens are promised, not made.

Sequences of opaque runs yield counts only. Sequences of real ids (a client of a simulated server) yield
their forced tokens, else a deterministic pseudo-text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.clock import WallClock
from bien.core.costs.memory import Room
from bien.core.errors import ResourceError
from bien.core.executors.simulated_drafts import SimulatedDrafts
from bien.core.kv.groups import KVGroup
from bien.core.plan import I32, ExecutorPlan, NewSequence, StepResult
from bien.core.request import TokenIds

StepCost = Callable[[ExecutorPlan], float]
"""Seconds of one step."""

GrowingCost = Callable[[ExecutorPlan, int], NDArray[Any]]
"""Seconds of each of so many steps: a plan of decodes, then the same one position further, and so on."""


class NoData:
    """`BlockIO` without memory behind it: transfers move nothing."""

    def read(self, group: int, blocks: list[int]) -> Any:
        return np.empty(0, dtype=np.uint8)

    def write(self, group: int, blocks: list[int], data: Any) -> None:
        pass


class SimulatedExecutor:
    """Every row that samples gains one token, and of its drafts as many as forced acceptance says."""

    simulated = True

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        cost: StepCost,
        vocab_size: int,
        *,
        virtual: bool,
        growing: GrowingCost | None = None,
        room: Room | None = None,
        io: NoData | None = None,
        drafts: SimulatedDrafts | None = None,
    ) -> None:
        """`growing`: where the cost depends on positions; it must say what `cost` would, plan by plan.
        `room`: what there is for KV; None: as much as anyone asks for. `drafts`: of a simulated drafter."""
        self.groups = groups
        self.room = room
        self.io = io or NoData()
        self.growing = growing
        self._drafts = drafts
        self._cost = cost
        self._vocab = vocab_size
        self._clock = None if virtual else WallClock()
        self._slots: dict[int, NewSequence] = {}

    def allocate(self, blocks: tuple[int, ...], slots: int, max_context: int) -> None:
        if len(blocks) != len(self.groups):
            raise ResourceError(f"{len(blocks)} pool sizes for {len(self.groups)} KV groups")
        if self.room is not None:
            self.room.check(blocks)

    def forward(self, plan: ExecutorPlan) -> ExecutorPlan:
        for slot in plan.released.tolist():
            self._slots.pop(slot, None)
        for new in plan.new:
            if self._drafts is not None:
                self._drafts.enter(new)
            if isinstance(new.tokens, TokenIds):
                self._slots[new.slot] = new
        return plan

    def sample(self, handle: ExecutorPlan, masks: Any = None) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(self.step(handle))
        return future

    def step(self, plan: ExecutorPlan, seconds: float | None = None) -> StepResult:
        """`sample`'s result at once: a future costs as much as all else here. `seconds`: what it takes,
        where that is known."""
        if seconds is None:
            seconds = self._cost(plan)
        drafts = self._drafts
        accepted = plan.samples if drafts is None else drafts.accepted(plan)
        tokens = self._tokens(plan, accepted) if self._slots else None
        if self._clock is not None:
            self._clock.block(seconds)
        proposed = None if drafts is None else drafts.proposed(plan)
        return StepResult(plan.step, accepted, tokens, proposed, seconds)

    def _tokens(self, plan: ExecutorPlan, accepted: I32) -> np.ndarray[Any, np.dtype[np.int32]]:
        out = []
        ends = (plan.starts + plan.counts - plan.drafts).tolist()
        for slot, end, gained in zip(plan.slots.tolist(), ends, accepted.tolist(), strict=True):
            new = self._slots.get(slot)
            out += [0 if new is None else self._token(new, end + i) for i in range(gained)]
        return np.asarray(out, dtype=np.int32)

    def _token(self, new: NewSequence, position: int) -> int:
        at = position - new.prompt_tokens
        if isinstance(new.forced, TokenIds) and at < len(new.forced):
            return new.forced.slice(at, at + 1).ids()[0]
        choice = f"/{new.sampling.choice}" if new.sampling.choice else ""
        return random.Random(f"{new.seed}/{position}{choice}").randrange(self._vocab)

    def close(self) -> None:
        self._slots.clear()
