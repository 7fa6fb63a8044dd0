"""The door for plugin authors. What is exported here is stable within an API number; the rest is private.

A plugin is a module with a `bien_providers` hook, named in the entry-point group "bien" of its
distribution. It imports this module (routers and trace formats also `bien.gateway.api` and
`bien.traces.api`) and keeps heavy imports (torch) inside its factories.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bien.core.architectures.base import Architecture, ArchitectureReader
from bien.core.architectures.deepseek import drafting_groups
from bien.core.architectures.fields import rope_parameters
from bien.core.architectures.registry import read_architecture
from bien.core.cache_folder import cache_folder
from bien.core.clock import Clock
from bien.core.costs.factors import CalibrationFile, read_calibration
from bien.core.costs.formats import Formats
from bien.core.costs.layout import Layout
from bien.core.costs.machine import Machine, load_machine, machines
from bien.core.costs.step import TERMS, StepModel
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
from bien.core.executors.base import BlockIO, Executor, HostLink
from bien.core.hooks import hookimpl
from bien.core.kernels.base import Kernels
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.groups import ITEM_BYTES, GroupKind, KVGroup, SnapshotPolicy, boundary_group
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.store import KVStore, Transfer
from bien.core.parallel.communicator import Communicator
from bien.core.parallel.strategy import Mesh, ParallelStrategy, Point
from bien.core.parallel.whole import Whole
from bien.core.plan import ExecutorPlan, NewSequence, PlanItem, StateCopy, StepPlan, StepResult, TableUpdate
from bien.core.providers import API, KINDS, Context, NoParameters, Provider
from bien.core.quantization.quantizer import LinearMethod, Quantizer, StackedMethod
from bien.core.request import BlockRuns, GenerateRequest, Prompt, SamplingParams, TokenIds
from bien.core.scheduler import Scheduler, SchedulerView
from bien.core.sequence import Sequence, Status
from bien.core.shared_library import LibrarySpec, compile_library, processor_flags
from bien.core.speculation.draft import ROOT, Draft, Scope
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import (
    DeviceDraft,
    DeviceSpeculator,
    DrafterParts,
    Drawer,
    HostSpeculator,
    SpeculatorCaps,
    TargetHandle,
)
from bien.core.worker.transfers import Job, TimedTransfers, TransferPool, Transfers, make_transfers

if TYPE_CHECKING:
    from bien.core.executors.rows import GroupRows as GroupRows
    from bien.core.executors.rows import Rows as Rows
    from bien.core.kernels.torch_kernels import TorchKernels as TorchKernels
    from bien.core.models.fetch import resolve_model as resolve_model
    from bien.core.models.rotary import Rotary as Rotary
    from bien.core.models.rotary import paired as paired
    from bien.core.text.tokenizer import Tokenizer as Tokenizer

__all__ = [
    "API",
    "HASH_BYTES",
    "ITEM_BYTES",
    "KINDS",
    "ROOT",
    "TERMS",
    "Architecture",
    "ArchitectureReader",
    "BienError",
    "BlockIO",
    "BlockRuns",
    "CalibrationFile",
    "Clock",
    "Communicator",
    "Context",
    "ContextLengthError",
    "DeploymentError",
    "DeviceDraft",
    "DeviceSpeculator",
    "Draft",
    "DrafterParts",
    "Drawer",
    "EventBatch",
    "Executor",
    "ExecutorPlan",
    "Formats",
    "GenerateRequest",
    "GroupKind",
    "GroupRows",
    "HostLink",
    "HostSpeculator",
    "Job",
    "KVEvent",
    "KVGroup",
    "KVStore",
    "Kernels",
    "Layout",
    "LibrarySpec",
    "LinearMethod",
    "Machine",
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
    "Rotary",
    "Rows",
    "SamplingParams",
    "Scheduler",
    "SchedulerView",
    "Scope",
    "Sequence",
    "SnapshotPolicy",
    "SpeculationSpec",
    "SpeculatorCaps",
    "StackedMethod",
    "StateCopy",
    "Status",
    "StepModel",
    "StepPlan",
    "StepResult",
    "TableUpdate",
    "TargetHandle",
    "TimedTransfers",
    "TokenIds",
    "Tokenizer",
    "TorchKernels",
    "TraceError",
    "Transfer",
    "TransferPool",
    "Transfers",
    "UserError",
    "Whole",
    "boundary_group",
    "cache_folder",
    "compile_library",
    "drafting_groups",
    "hookimpl",
    "load_machine",
    "machine_executor",
    "machines",
    "make_transfers",
    "nearest",
    "paired",
    "processor_flags",
    "read_architecture",
    "read_calibration",
    "resolve_model",
    "rope_parameters",
    "simulated_executor",
    "torch_executor",
]


def simulated_executor(ctx: Context, cost: Callable[[ExecutorPlan], float]) -> Executor:
    """The executor of simulations: a step takes `cost(plan)` seconds, tokens are counted, not made.

    On a wall clock it waits as long (a simulated server for real clients); on a virtual one it does not.
    """
    from bien.core.executors.simulated import SimulatedExecutor
    from bien.core.executors.simulated_drafts import SimulatedDrafts

    if ctx.architecture is None:
        raise UserError("a simulated executor needs the architecture of the model in its context")
    vocab, virtual = ctx.architecture.vocab_size, ctx.clock.virtual
    return SimulatedExecutor(ctx.groups, cost, vocab, virtual=virtual, drafts=SimulatedDrafts.of(ctx))


def machine_executor(ctx: Context, model: StepModel, *, limited: bool = True, pace: float = 1.0) -> Executor:
    """The same with the costs of `model`, a machine's, times `pace`: pools that do not fit it are refused, a
    pool that says nothing of its KV gets what fits, and KV stores copy at the speed of the link to the host.
    `limited` False: any pool is taken."""
    from bien.core.executors.simulated_machine import machine_executor

    return machine_executor(ctx, model, limited, pace)


def torch_executor(ctx: Context) -> Executor:
    """The executor that loads `ctx.architecture`'s weights and runs them with torch on `ctx.device`, in
    `ctx.dtype`. `ctx.parts` names the pool's "quantizer", "parallel" and, if any, "speculator"."""
    from bien.core.executors.make import make_executor

    return make_executor(ctx)


def __getattr__(name: str) -> Any:
    # What needs torch, or much else: imported when a factory asks for it.
    modules = {
        "GroupRows": "bien.core.executors.rows",
        "Rotary": "bien.core.models.rotary",
        "Rows": "bien.core.executors.rows",
        "Tokenizer": "bien.core.text.tokenizer",
        "TorchKernels": "bien.core.kernels.torch_kernels",
        "paired": "bien.core.models.rotary",
        "resolve_model": "bien.core.models.fetch",
    }
    if name in modules:
        return getattr(import_module(modules[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
