"""Which installed parts can run a model, asked without loading it: what `bien model inspect` shows."""

from __future__ import annotations

from typing import Any

import msgspec

from bien.core.architectures.base import Architecture
from bien.core.architectures.gguf import ARCHITECTURES
from bien.core.errors import BienError
from bien.core.models.modules import METHODS, MODELS
from bien.core.plugins import PluginManager
from bien.core.providers import Context, Provider

DEVICES = (1, 2, 4, 8, 16)  # ranks that a strategy is asked for
KINDS = ("executor", "quantizer", "kernels", "kv_store")  # whose parts take any model that there is


def supported(a: Architecture, block_tokens: int, manager: PluginManager) -> dict[str, Any]:
    """JSON-ready: names of providers by kind; of parallel strategies the numbers of devices, of parts that
    refuse this model why; the formats that its weights may lie in. Nothing is loaded or allocated."""
    runs = a.name in MODELS
    found: dict[str, Any] = {"weights": _formats(a) if runs else []}
    found |= {kind: manager.names(kind) for kind in KINDS}
    found |= {"parallel": {}, "speculator": []}
    refused: dict[str, str] = {}
    if not runs:
        found["executor"] = [name for name in found["executor"] if name != "torch"]
        refused["executor torch"] = f"there is no torch module for architecture {a.name!r}"
    for provider in sorted((i.provider for i in manager.installed), key=lambda p: p.name):
        try:
            if provider.kind == "parallel":
                found["parallel"][provider.name] = _devices(provider, a)
            elif provider.kind == "speculator":
                _draft(provider, a, block_tokens)
                found["speculator"].append(provider.name)
        except BienError as error:
            refused[f"{provider.kind} {provider.name}"] = str(error)
    return {**found, "refused": refused}


def _formats(a: Architecture) -> list[str]:
    gguf = ["gguf"] if a.name in {kind for kind, _, _ in ARCHITECTURES.values()} else []
    return ["safetensors", *METHODS, *gguf]


def _devices(provider: Provider, a: Architecture) -> list[int]:
    strategy = provider.factory(provider.config_type(), Context(architecture=a, groups=a.groups))
    legal = []
    for world in DEVICES:
        try:
            strategy.mesh(world)
        except BienError:
            continue
        legal.append(world)
    strategy.close()
    return legal


def _draft(provider: Provider, a: Architecture, block_tokens: int) -> None:
    # Host drafters take any model; those with entries of their own say in their parameters which. A drafter
    # that needs a checkpoint takes the models that this was trained for: nothing to be said without it.
    groups = getattr(provider.config_type, "groups", None)
    if groups is not None and not any(f.required for f in msgspec.structs.fields(provider.config_type)):
        groups(provider.config_type(), a, block_tokens)
