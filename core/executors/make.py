"""From a `Context` to a loaded `TorchExecutor`. Imports torch."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bien.core.architectures.base import Architecture
from bien.core.architectures.registry import read_architecture
from bien.core.errors import CollectiveError, ModelError, PluginFault, UserError
from bien.core.executors.base import Executor
from bien.core.executors.group import GroupExecutor
from bien.core.executors.pools import DTYPES
from bien.core.executors.rank_messages import Join
from bien.core.executors.ranks import END_SECONDS, Ranks
from bien.core.executors.torch_executor import TorchExecutor
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.memory import return_free_memory
from bien.core.models.fetch import resolve_model
from bien.core.models.formats import check_readable
from bien.core.models.mtp import load_predicting
from bien.core.models.registry import CausalModel, ModelParts, load_model
from bien.core.parallel.communicator import Communicator
from bien.core.parallel.shards import rank_groups
from bien.core.parallel.whole import Whole
from bien.core.providers import Context
from bien.core.speculation.speculator import DeviceSpeculator, DrafterParts

log = logging.getLogger("bien.worker")


def make_executor(ctx: Context) -> Executor:
    """Load `ctx.architecture`'s model. `ctx.parts`: "quantizer", "parallel", and optionally "speculator" (a
    host drafter is left to the engine), "kernels" (default: torch's), "progress" (as `resolve_model` takes
    it).
    Where `ctx.mesh` has several ranks, this process is rank 0 and `ctx.ranks` says how to reach the others;
    they divide `ctx.threads`."""
    if ctx.mesh is None or ctx.mesh.world == 1:
        return load_executor(ctx)
    if ctx.ranks is None:
        raise PluginFault(f"the torch executor's context has {ctx.mesh.world} ranks and no way to reach them")
    return make_group(ctx, ctx.ranks, ctx.mesh.world)


def make_group(ctx: Context, ranks: Ranks, world: int) -> GroupExecutor:
    """Rank 0, once every rank has loaded its part. Raises what any of them fails with."""
    architecture = _architecture(ctx)
    usable_device(ctx.device)
    ctx.threads = max(1, ctx.threads // world)
    resolve_model(architecture.model, ctx.parts.get("progress"))  # what it fetches, it fetches once
    with ExitStack() as made:
        made.callback(ranks.met)
        remotes = ranks.open(world, ctx.threads)
        for remote in remotes:
            made.callback(remote.kill)
        for remote in remotes:
            remote.answer()
        for remote in remotes:
            remote.send(Join())
        try:
            communicator = ranks.communicator(0, world, ctx.device)
            made.callback(communicator.close)
            local = load_executor(ctx, communicator)
        except CollectiveError:
            for remote in remotes:
                if remote.ended.wait(END_SECONDS):
                    remote.answer()
            raise
        for remote in remotes:
            remote.heads = remote.loaded()
        groups = executor_groups(architecture, local.drafter)
        heads = ctx.parts["parallel"].kv_shard(architecture.kv_heads)
        group = GroupExecutor(local, remotes, groups, heads, architecture.kv_heads, communicator)
        made.pop_all()
        ranks.met()
    return group


def load_executor(ctx: Context, communicator: Communicator | None = None) -> TorchExecutor:
    """The executor of this process alone, on `ctx.device`. `communicator`: it is one rank of several."""
    architecture = _architecture(ctx)
    torch.set_num_threads(ctx.threads)
    quantizer, strategy = ctx.parts["quantizer"], ctx.parts["parallel"]
    check_readable(architecture.config, architecture.model)
    # What is quantized on disk is dequantized while it is read: quantizers are given full precision.
    if not quantizer.matches({**architecture.config, "quantization_config": None}):
        raise ModelError(f"model {architecture.model!r}: the selected quantizer cannot read its weights")
    kernels = ctx.parts.get("kernels") or TorchKernels()
    if communicator is not None:
        strategy.connect(communicator)
    device = usable_device(ctx.device)
    folder = Path(resolve_model(architecture.model, ctx.parts.get("progress")))
    parts = ModelParts(quantizer, strategy, kernels, DTYPES[ctx.dtype], device)
    with torch.inference_mode():
        model = load_model(architecture, folder, parts)
    if architecture.unread and (communicator is None or communicator.rank == 0):
        listed = ", ".join(architecture.unread)
        log.warning("model %r: bien does not read fields of its config.json: %s", architecture.model, listed)
    return_free_memory()
    drafter = device_drafter(ctx.parts.get("speculator"))
    groups = executor_groups(architecture, drafter)
    if communicator is not None:
        groups = rank_groups(groups, strategy, architecture.kv_heads)
    return TorchExecutor(
        model,
        groups,
        kernels,
        device,
        ctx.clock,
        drafter,
        drafter_parts(architecture, folder, model, parts, ctx.parts.get("progress")),
        ctx.speculation,
        strict=communicator is not None,
    )


def drafter_parts(
    architecture: Architecture, folder: Path, target: CausalModel, parts: ModelParts, progress: Any = None
) -> DrafterParts:
    """What a device drafter of the model in `folder` is loaded with. A model that it loads is whole on every
    rank; the target's own layers are cut as the target is."""

    def further(name: str | Path) -> CausalModel:
        own = Path(resolve_model(name, progress))
        dtype = next(n for n, d in DTYPES.items() if d is parts.dtype)
        other = read_architecture(own, architecture.groups[0].block_tokens, dtype)
        check_readable(other.config, str(name))
        whole = ModelParts(parts.quantizer, Whole(), parts.kernels, parts.dtype, parts.device)
        with torch.inference_mode():
            return load_model(other, own, whole)

    def predicting() -> list[Any]:
        with torch.inference_mode():
            return list(load_predicting(architecture, folder, target, parts))  # type: ignore[arg-type]

    return DrafterParts(parts.dtype, parts.device, parts.kernels, further, predicting)


def rank_device(name: str, rank: int) -> str:
    """The device of the `rank`-th rank of a machine: "cuda" and "cuda:N" count on from there, any other name
    stands for all."""
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        return name
    return f"cuda:{int(index or 0) + rank}" if index or rank else name


def _architecture(ctx: Context) -> Architecture:
    if ctx.architecture is None:
        raise PluginFault("the torch executor's context has no architecture")
    return ctx.architecture


def executor_groups(architecture: Architecture, drafter: DeviceSpeculator | None) -> Any:
    """The model's KV groups, then the drafter's own."""
    if drafter is None:
        return architecture.groups
    return (*architecture.groups, *drafter.groups(architecture, architecture.groups[0].block_tokens))


def device_drafter(speculator: Any) -> DeviceSpeculator | None:
    """The speculator if it runs inside the executor."""
    return speculator if speculator is not None and speculator.caps.place == "device" else None


def usable_device(name: str) -> torch.device:
    """UserError for a device that torch does not know or cannot reach."""
    try:
        device = torch.device(name)
        if device.type == "meta":  # torch makes tensors there, without contents
            raise RuntimeError("it holds no data")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device {name!r} cannot be used: {reason}; valid: cpu, cuda:N", field="device"
        ) from error
    return device
