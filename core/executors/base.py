"""The executor contract, the most important one.

`forward` and `sample` are two calls, so that grammar masks overlap the forward. Plans are executed in
the order of `forward` calls; a plan may be issued before the result of the one before is known, and
then reads the tokens that the executor itself has sampled.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from bien.core.kv.groups import KVGroup
from bien.core.plan import ExecutorPlan, StepResult


class BlockIO(Protocol):
    """Access to the device pools for KV stores. Thread-safe for blocks that no plan writes."""

    def read(self, group: int, blocks: list[int]) -> Any:
        """A copy of the blocks' contents in host memory (opaque to the store; `nbytes` says its size)."""
        ...

    def write(self, group: int, blocks: list[int], data: Any) -> None:
        """Put back what `read` returned, into these blocks."""
        ...


@runtime_checkable
class HostLink(Protocol):
    """A `BlockIO` of a simulated machine: how fast its blocks travel to the host and back."""

    bytes_per_s: float  # of one link
    lanes: int  # transfers at a time
    shares: tuple[float, ...]  # by group: what one link carries of a block, others the rest at the same time


class Executor(Protocol):
    """Holds weights, KV pools and per-slot state (tokens, block tables, sampling parameters).

    A step that fails raises; the next one is tried. ExecutorDiedError says that none will work: the engine's
    thread ends with it. An executor that can die between steps has `watch(on_death)` as well, and calls
    `on_death(error)` once, from any thread.
    """

    groups: tuple[KVGroup, ...]  # the model's and the device drafter's, in plan order

    @property
    def io(self) -> BlockIO:
        """The pools' contents, once they are allocated."""
        ...

    def allocate(self, blocks: tuple[int, ...], slots: int, max_context: int) -> None:
        """Allocate pools of blocks[g] usable blocks per group (ids 1..blocks[g]; 0 is the null block)
        and `slots` sequence slots. Raises ResourceError naming the bytes asked for and available."""
        ...

    def forward(self, plan: ExecutorPlan) -> Any:
        """Start a step; returns a handle for `sample`."""
        ...

    def sample(self, handle: Any, masks: Any = None) -> Future[StepResult]:
        """Sample, verify drafts, replace by forced tokens, take snapshots, let a device drafter propose."""
        ...

    def close(self) -> None: ...
