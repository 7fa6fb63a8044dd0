"""The order in which a rank does things: what a step yields comes late, by a plan or by a transfer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from bien.core.executors.plan_wire import Verdict, encode, pack_verdict
from bien.core.executors.pools import HostBlocks
from bien.core.executors.rank import RankLoop
from bien.core.executors.rank_messages import ReadBlocks, Settle
from bien.core.plan import ExecutorPlan, i32

VERDICT = Verdict(i32([1]), i32([7]))


class Recording:
    """An executor that writes down what it is told."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.pools = [None]
        self.io = self

    def forward(self, plan: ExecutorPlan) -> Any:
        self.done.append(f"forward {plan.step}")
        return SimpleNamespace(plan=plan)

    def commit(self, step: Any, accepted: Any, tokens: Any) -> None:
        self.done.append(f"commit {step.plan.step}: {accepted.tolist()} {tokens.tolist()}")

    def draft(self, plan: ExecutorPlan) -> None:
        self.done.append(f"draft behind {plan.step}")

    def read(self, group: int, blocks: list[int]) -> HostBlocks:
        self.done.append(f"read {blocks}")
        return HostBlocks(torch.zeros(1, len(blocks), 2))


def plan(step: int, **fields: Any) -> ExecutorPlan:
    return ExecutorPlan(
        step, i32([0]), i32([4]), i32([1]), fields.pop("drafts", i32([0])), i32([1]), **fields
    )


def made() -> tuple[RankLoop, Recording]:
    loop, executor = RankLoop(), Recording()
    loop.executor = executor  # type: ignore[assignment]
    return loop, executor


def test_the_yield_of_a_step_comes_with_the_next_one() -> None:
    loop, executor = made()
    loop._step(encode(plan(1), None))
    loop._step(encode(plan(2, drafts=i32([3]), device_drafts=True), VERDICT))
    loop._step(encode(plan(3), None))  # step 2 was not sampled
    assert executor.done == ["forward 1", "commit 1: [1] [7]", "forward 2", "forward 3"]


def test_drafts_come_behind_what_a_step_yielded() -> None:
    loop, executor = made()
    loop._step(encode(plan(1), None))
    loop._draft(Settle(*pack_verdict(VERDICT)))
    loop._step(encode(plan(2), None))
    loop._move(ReadBlocks(0, [5], 2, *pack_verdict(VERDICT)))  # a transfer brings the yield first
    loop._draft(Settle(*pack_verdict(VERDICT)))
    assert executor.done[:3] == ["forward 1", "commit 1: [1] [7]", "draft behind 1"]
    assert executor.done[3:] == ["forward 2", "commit 2: [1] [7]", "read [5]", "draft behind 2"]


def test_a_transfer_comes_behind_the_step_that_it_follows() -> None:
    """Rank 0 has the result of step 1 while this rank is still in it, and knows what it yielded."""
    loop, executor = made()
    request = ReadBlocks(0, [5], 1, *pack_verdict(VERDICT))
    transfer = threading.Thread(target=loop._move, args=(request,), daemon=True)
    transfer.start()
    transfer.join(0.1)
    assert transfer.is_alive() and executor.done == []
    loop._step(encode(plan(1), None))
    transfer.join(10)
    assert executor.done == ["forward 1", "commit 1: [1] [7]", "read [5]"]
    loop._step(encode(plan(2), VERDICT))
    assert executor.done[3:] == ["forward 2"], "committed once"
    loop._move(request)  # asked before rank 0 had the result of step 2
    assert executor.done[4:] == ["read [5]"]
    loop._step(encode(plan(3), Verdict(i32([1]), i32([8]))))
    assert executor.done[5:] == ["commit 2: [1] [8]", "forward 3"]
