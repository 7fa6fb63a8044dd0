"""Kernels `torch`: every operation in plain torch."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import Context, Kernels, NoParameters, Provider, hookimpl


def make(config: NoParameters, ctx: Context) -> Kernels:
    from bien.core.api import TorchKernels

    return TorchKernels()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("kernels", "torch", make, summary="plain torch, on any device and in any dtype")]
