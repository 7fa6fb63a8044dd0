"""From a `Context` to a loaded `TorchExecutor`. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bien.core.architectures.base import Architecture
from bien.core.errors import ModelError, PluginFault, UserError
from bien.core.executors.pools import DTYPES
from bien.core.executors.torch_executor import TorchExecutor
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.models.fetch import resolve_model
from bien.core.models.registry import ModelParts, load_model
from bien.core.providers import Context
from bien.core.speculation.speculator import DeviceSpeculator


def make_executor(ctx: Context) -> TorchExecutor:
    """Load `ctx.architecture`'s model. `ctx.parts`: "quantizer", "parallel", and optionally "speculator" (a
    host drafter is left to the engine), "kernels", "progress" (as `resolve_model` takes it)."""
    architecture = ctx.architecture
    if architecture is None:
        raise PluginFault("the torch executor's context has no architecture")
    torch.set_num_threads(ctx.threads)
    quantizer, strategy = ctx.parts["quantizer"], ctx.parts["parallel"]
    if not quantizer.matches(architecture.config):
        raise ModelError(
            f"model {architecture.model!r}: the selected quantizer cannot read its weights "
            f"(quantization_config: {architecture.config.get('quantization_config')!r})"
        )
    kernels = ctx.parts.get("kernels") or TorchKernels()
    device = usable_device(ctx.device)
    folder = Path(resolve_model(architecture.model, ctx.parts.get("progress")))
    parts = ModelParts(quantizer, strategy, kernels, DTYPES[ctx.dtype], device)
    with torch.inference_mode():
        model = load_model(architecture, folder, parts)
    drafter = device_drafter(ctx.parts.get("speculator"))
    return TorchExecutor(model, executor_groups(architecture, drafter), kernels, device, ctx.clock, drafter)


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
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device {name!r} cannot be used: {reason}; valid: cpu, cuda:N", field="device"
        ) from error
    return device
