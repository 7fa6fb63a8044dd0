"""Executor `torch`: the model in this process, on CPU or any torch device."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import Context, Executor, NoParameters, Provider, hookimpl, torch_executor


def make(config: NoParameters, ctx: Context) -> Executor:
    return torch_executor(ctx)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("executor", "torch", make, summary="runs the model with torch")]
