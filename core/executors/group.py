"""`GroupExecutor`: rank 0 of several that run one model. See `Executor`.

Every rank runs the same plans on its part of the model. Rank 0 sends each of them one message per step, with
the plan and what the step before it yielded, and samples alone. Nobody answers; while they compute, ranks
meet in the collectives of the strategy. A rank that ends, ends the group.

    rank 0   [send n] forward n, sample n   [send n+1: plan n+1, yield of n] forward n+1 ...
    rank 1            forward n                       commit n, forward n+1 ...

Where a device drafter lives, the yield of a step is sent as soon as it is known, and all ranks absorb and
draft then: drafters may meet in collectives too. One that fails ends the group: ranks must not differ in what
they compute.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from bien.core.clock import WallClock
from bien.core.errors import ExecutorDiedError, PluginFault, ResourceError
from bien.core.executors.group_io import GroupIO, LastStep
from bien.core.executors.link import pack
from bien.core.executors.plan_wire import Verdict, encode, pack_verdict
from bien.core.executors.pools import available_bytes
from bien.core.executors.rank_messages import Allocate, Settle
from bien.core.executors.ranks import RemoteRank
from bien.core.executors.torch_executor import Step, TorchExecutor
from bien.core.kv.groups import KVGroup
from bien.core.parallel.communicator import Communicator
from bien.core.parallel.shards import engine_bytes
from bien.core.plan import ExecutorPlan, StepResult
from bien.core.request import TokenIds

CAUSE_SECONDS = 2.0  # after a failed collective, until the rank that died is known to have


class GroupExecutor:
    """Closes the communicator; the ranks end with it."""

    def __init__(
        self,
        local: TorchExecutor,
        remotes: list[RemoteRank],
        groups: tuple[KVGroup, ...],
        heads: range,
        kv_heads: int,
        communicator: Communicator,
    ) -> None:
        """`groups`: those of the whole engine; `heads`: the KV heads that rank 0 holds."""
        self.groups, self.local = groups, local
        self._remotes, self._communicator, self._kv_heads = remotes, communicator, kv_heads
        self._last = LastStep(0, None)
        self._yield: Verdict | None = None  # of the last step, until it is sent
        self.io = GroupIO(local, remotes, groups, heads, kv_heads, lambda: self._last)
        self._death: ExecutorDiedError | None = None
        self._mourner: Callable[[ExecutorDiedError], None] | None = None
        self._closing = False
        self._lock = threading.Lock()  # over the three above
        for remote in remotes:
            remote.on_end = self._ended
            if remote.ended.is_set():
                self._ended(remote)

    def allocate(self, blocks: tuple[int, ...], slots: int, max_context: int) -> None:
        self._fit(blocks)
        self._last, self._yield = LastStep(0, None), None
        wish = Allocate(blocks, slots, max_context)
        for remote in self._remotes:
            remote.send(wish)
        self.local.allocate(blocks, slots, max_context)
        for remote in self._remotes:
            remote.answer()

    def forward(self, plan: ExecutorPlan) -> Step:
        if self._death is not None:
            raise self._death
        if any(not isinstance(new.tokens, TokenIds) for new in plan.new):
            raise PluginFault(
                "the torch executor needs token ids; opaque block runs only run in a simulation"
            )
        frame, self._yield = pack(encode(plan, self._yield)), None
        try:
            for remote in self._remotes:
                remote.steps.send_packed(frame)
            return self.local.forward(plan)
        except Exception as error:
            raise self._broken(error) from error

    def sample(self, handle: Step, masks: Any = None) -> Future[StepResult]:
        plan = handle.plan
        accepted, tokens, logprobs = self.local.judge(handle, masks)
        verdict = Verdict(accepted, tokens)
        self._last = LastStep(plan.step, verdict)
        if self.local.drafter is None:
            self._yield = verdict
            self.local.commit(handle, accepted, tokens)
            return self.local.answer(handle, accepted, tokens, logprobs, None)
        frame = pack(Settle(*pack_verdict(verdict)))
        try:
            for remote in self._remotes:
                remote.steps.send_packed(frame)
            self.local.commit(handle, accepted, tokens)
            drafts = self.local.draft(plan)
        except Exception as error:
            raise self._broken(error) from error
        return self.local.answer(handle, accepted, tokens, logprobs, drafts)

    def watch(self, on_death: Callable[[ExecutorDiedError], None]) -> None:
        """Called when the group has died, from any thread; at once if it has already."""
        with self._lock:
            self._mourner, dead = on_death, self._death
        if dead is not None:
            on_death(dead)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        for remote in self._remotes:
            remote.close()
        self._communicator.close()
        self.local.close()

    def _fit(self, blocks: tuple[int, ...]) -> None:
        # Each rank looks for itself as well; on one machine they would all see the same free memory.
        if self.local.device.type != "cpu":
            return
        ranks = 1 + len(self._remotes)
        here = 1 + sum(remote.host in ("", socket.gethostname()) for remote in self._remotes)
        whole = sum(
            engine_bytes(g, self._kv_heads, ranks) * (n + 1) for g, n in zip(self.groups, blocks, strict=True)
        )
        need, free = whole * here // ranks, available_bytes(self.local.device)
        if need > free:
            raise ResourceError(
                f"KV pools of {here} ranks on this machine need {need:,} bytes, but {free:,} are available; "
                "lower kv_tokens or slots of the pool"
            )

    def _broken(self, error: Exception) -> ExecutorDiedError:
        # Ranks may wait for us in a collective: after a step that broke off nothing fits any more.
        culprit = self._culprit()
        return self._die(culprit.obituary() if culprit else f"rank 0: {type(error).__name__}: {error}")

    def _ended(self, remote: RemoteRank) -> None:
        if not self._closing and self._death is None:
            self._die((self._culprit() or remote).obituary())

    def _culprit(self) -> RemoteRank | None:
        # One that ended because another did says so, and may be heard of first.
        clock = WallClock()
        until = clock.time() + CAUSE_SECONDS
        while True:
            ended = [r for r in self._remotes if r.ended.is_set()]
            guilty = [r for r in ended if not r.is_witness]
            if guilty or clock.time() >= until:
                return next(iter(guilty or ended), None)
            clock.block(0.01)

    def _die(self, reason: str) -> ExecutorDiedError:
        with self._lock:
            if self._death is not None:
                return self._death
            size = 1 + len(self._remotes)
            death = self._death = ExecutorDiedError(f"the group of {size} ranks has ended: {reason}")
            mourner = None if self._closing else self._mourner
        for remote in self._remotes:
            remote.kill()
        if mourner is not None:
            mourner(death)
        return death
