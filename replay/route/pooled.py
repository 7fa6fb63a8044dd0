"""One worker in place of n: all their cache in one pool, and the same computing power.

It shows what a cache of this size can hit at all when nothing is ever on another replica. A step of it may
hold n times the tokens and rows, and costs what n workers side by side would take for equal shares of them:

    seconds = base + (seconds of one worker for all of it - base) / n

where base is the step of a worker that computes one token of one sequence.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.build import BuiltWorker
from bien.core.compose import compose
from bien.core.deployment import Deployment, PoolSpec, Selection
from bien.core.plan import ExecutorPlan, StepResult
from bien.core.plugins import PluginManager

_GROWING = ("token_budget", "max_running")  # parameters of schedulers that bound a step


def pooled(deployment: Deployment, manager: PluginManager) -> Deployment:
    """The deployment with the only worker of its only pool in place of all of them."""
    pool = deployment.pool[0]
    n = pool.count
    config = compose(deployment, manager).pools[0].parts["scheduler"].config
    more = {k: v * n for k in _GROWING if isinstance(v := getattr(config, k, None), int)}
    executor = pool.executor
    if "machine" in executor.parameters:
        executor = Selection(executor.use, {**executor.parameters, "unlimited": True})
    one: PoolSpec = msgspec.structs.replace(
        pool,
        count=1,
        kv_tokens=(pool.kv_tokens or 0) * n,
        slots=pool.slots * n,
        snapshots=pool.snapshots * n,
        scheduler=Selection(pool.scheduler.use, {**pool.scheduler.parameters, **more}),
        executor=executor,
    )
    return msgspec.structs.replace(deployment, pool=(one,))


def shared_among(built: BuiltWorker, n: int) -> BuiltWorker:
    """The worker with an executor that computes as n do."""
    return dataclasses.replace(built, executor=PooledExecutor(built.executor, n))


class PooledExecutor:
    """Around a simulated executor."""

    simulated = True

    def __init__(self, inner: Any, n: int) -> None:
        self._inner, self._n = inner, n
        one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
        self._base = inner.sample(ExecutorPlan(0, none, none, one, none, one)).result().seconds
        self.groups, self.io = inner.groups, inner.io
        self.growing = None if getattr(inner, "growing", None) is None else self._growing

    def allocate(self, blocks: tuple[int, ...], slots: int, max_context: int) -> None:
        self._inner.allocate(blocks, slots, max_context)

    def forward(self, plan: ExecutorPlan) -> ExecutorPlan:
        found: ExecutorPlan = self._inner.forward(plan)
        return found

    def sample(self, handle: ExecutorPlan, masks: Any = None) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        result = self._inner.sample(handle, masks).result()
        future.set_result(dataclasses.replace(result, seconds=float(self._divided(result.seconds))))
        return future

    def _growing(self, plan: ExecutorPlan, steps: int) -> NDArray[Any]:
        found: NDArray[Any] = self._divided(self._inner.growing(plan, steps))
        return found

    def _divided(self, seconds: Any) -> Any:
        return self._base + (seconds - self._base) / self._n

    def close(self) -> None:
        self._inner.close()
