"""The door for plugin authors. What is exported here is stable within an API number; the rest is private.

A plugin is a module with a `bien_providers` hook, named in the entry-point group "bien" of its
distribution. It imports this module (routers and trace formats also `bien.gateway.api` and
`bien.traces.api`) and keeps heavy imports (torch) inside its factories.
"""

from __future__ import annotations

from collections.abc import Callable

from bien.core.architectures.base import Architecture, ArchitectureReader
from bien.core.clock import Clock
from bien.core.errors import (
    BienError,
    ContextLengthError,
    DeploymentError,
    ModelError,
    OverloadError,
    PluginError,
    PluginFault,
    ResourceError,
    TraceError,
    UserError,
    nearest,
)
from bien.core.executors.base import BlockIO, Executor
from bien.core.hooks import hookimpl
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.groups import GroupKind, KVGroup, SnapshotPolicy
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.store import KVStore, Transfer
from bien.core.parallel.communicator import Communicator
from bien.core.parallel.strategy import Mesh, ParallelStrategy, Point
from bien.core.plan import ExecutorPlan, NewSequence, PlanItem, StateCopy, StepPlan, StepResult, TableUpdate
from bien.core.providers import API, KINDS, Context, NoParameters, Provider
from bien.core.quantization.quantizer import LinearMethod, Quantizer
from bien.core.request import BlockRuns, GenerateRequest, Prompt, SamplingParams, TokenIds
from bien.core.scheduler import Scheduler, SchedulerView
from bien.core.sequence import Sequence, Status
from bien.core.speculation.speculator import (
    DeviceSpeculator,
    HostSpeculator,
    SpeculatorCaps,
    TargetHandle,
)
from bien.core.worker.transfers import Job, TimedTransfers, TransferPool, Transfers, make_transfers

__all__ = [
    "API",
    "HASH_BYTES",
    "KINDS",
    "Architecture",
    "ArchitectureReader",
    "BienError",
    "BlockIO",
    "BlockRuns",
    "Clock",
    "Communicator",
    "Context",
    "ContextLengthError",
    "DeploymentError",
    "DeviceSpeculator",
    "EventBatch",
    "Executor",
    "ExecutorPlan",
    "GenerateRequest",
    "GroupKind",
    "HostSpeculator",
    "Job",
    "KVEvent",
    "KVGroup",
    "KVStore",
    "LinearMethod",
    "Mesh",
    "ModelError",
    "NewSequence",
    "NoParameters",
    "OverloadError",
    "ParallelStrategy",
    "PlanItem",
    "PluginError",
    "PluginFault",
    "Point",
    "Prompt",
    "Provider",
    "Quantizer",
    "ResourceError",
    "SamplingParams",
    "Scheduler",
    "SchedulerView",
    "Sequence",
    "SnapshotPolicy",
    "SpeculatorCaps",
    "StateCopy",
    "Status",
    "StepPlan",
    "StepResult",
    "TableUpdate",
    "TargetHandle",
    "TimedTransfers",
    "TokenIds",
    "TraceError",
    "Transfer",
    "TransferPool",
    "Transfers",
    "UserError",
    "hookimpl",
    "make_transfers",
    "nearest",
    "simulated_executor",
    "torch_executor",
]


def simulated_executor(ctx: Context, cost: Callable[[ExecutorPlan], float]) -> Executor:
    """The executor of simulations: a step takes `cost(plan)` seconds, tokens are counted, not made.

    On a wall clock it waits as long (a simulated server for real clients); on a virtual one it does not.
    """
    from bien.core.executors.simulated import SimulatedExecutor

    if ctx.architecture is None:
        raise UserError("a simulated executor needs the architecture of the model in its context")
    return SimulatedExecutor(ctx.groups, cost, ctx.architecture.vocab_size, virtual=ctx.clock.virtual)


def torch_executor(ctx: Context) -> Executor:
    """The executor that loads `ctx.architecture`'s weights and runs them with torch on `ctx.device`, in
    `ctx.dtype`. `ctx.parts` names the pool's "quantizer", "parallel" and, if any, "speculator"."""
    from bien.core.executors.make import make_executor

    return make_executor(ctx)
