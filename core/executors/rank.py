"""A rank other than 0: runs the plans that it is sent on its part of the model, and answers none of them.

It does not sample. What a step yielded comes with the next step's message, or in one of its own where there
is a device drafter; until then the step waits here.
Transfers of blocks do not wait for a next step: their messages carry the same, and whichever comes first is
taken.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from bien.core.errors import BienError
from bien.core.executors.link import Link, LinkClosed
from bien.core.executors.plan_wire import StepMessage, Verdict, decode, unpack_verdict
from bien.core.executors.pools import HostBlocks, Pool
from bien.core.executors.rank_messages import (
    Allocate,
    Blocks,
    BlocksDown,
    Close,
    Done,
    Down,
    Fault,
    Join,
    ReadBlocks,
    Settle,
    WriteBlocks,
)
from bien.core.executors.torch_executor import Step, TorchExecutor
from bien.core.plan import ExecutorPlan
from bien.core.worker.start import Failed


class RankLoop:
    """`run` on one thread, `serve_blocks` on another. `executor` is set once it is loaded, before `run`; no
    blocks are asked for earlier."""

    executor: TorchExecutor

    def __init__(self) -> None:
        self._turn = threading.Condition()  # over what follows, and over commits
        self._waiting: Step | None = None  # computed, its yield unknown
        self._computed = 0  # the last step
        self._plan: ExecutorPlan | None = None  # its

    def run(self, steps: Link[Down]) -> None:
        """Until rank 0 says so. LinkClosed when rank 0 is gone; what a step raises."""
        while True:
            match steps.receive():
                case StepMessage() as message:
                    self._step(message)
                case Settle() as message:
                    self._draft(message)
                case Allocate() as wish:
                    self.executor.allocate(wish.blocks, wish.slots, wish.max_context)
                    self._waiting, self._computed, self._plan = None, 0, None
                    steps.send(Done())
                case Close():
                    return
                case Join():
                    raise BienError("a rank joins once")

    def serve_blocks(self, link: Link[BlocksDown]) -> None:
        """Until the link ends."""
        while True:
            try:
                request = link.receive()
            except LinkClosed:
                return
            try:
                answer: Blocks | Fault = Blocks(self._move(request))
            except Exception as error:
                answer = Fault(Failed(BienError.code, f"{type(error).__name__}: {error}"))
            try:
                link.send(answer)
            except LinkClosed:
                return

    def _step(self, message: StepMessage) -> None:
        plan, verdict = decode(message)
        with self._turn:
            self._settle(verdict)
        step = self.executor.forward(plan)
        with self._turn:
            self._waiting, self._computed, self._plan = step, plan.step, plan
            self._turn.notify_all()

    def _draft(self, message: Settle) -> None:
        with self._turn:
            self._settle(unpack_verdict(message.accepted, message.gained))
        if self._plan is not None:
            self.executor.draft(self._plan)

    def _settle(self, verdict: Verdict | None) -> None:
        step, self._waiting = self._waiting, None
        if step is not None and verdict is not None:
            self.executor.commit(step, verdict.accepted, verdict.tokens)

    def _move(self, request: ReadBlocks | WriteBlocks) -> Any:
        with self._turn:
            self._turn.wait_for(lambda: self._computed >= request.after)
            if self._waiting is not None and self._waiting.plan.step == request.after:
                self._settle(unpack_verdict(request.accepted, request.gained))
        pool = self.executor.pools[request.group]
        if isinstance(request, ReadBlocks):
            return as_bytes(self.executor.io.read(request.group, request.blocks))
        data = from_bytes(request.data, pool, len(request.blocks))
        self.executor.io.write(request.group, request.blocks, data)
        return b""


def as_bytes(blocks: HostBlocks) -> bytes:
    return blocks.data.reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, pool: Pool, count: int) -> HostBlocks:
    """`as_bytes` of `count` blocks of a pool's group, read-only."""
    layers, _, *rest = pool.data.shape
    flat = torch.frombuffer(bytearray(data), dtype=pool.data.dtype)
    return HostBlocks(flat.view(layers, count, *rest))
