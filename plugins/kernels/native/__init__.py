"""Kernels `native`: C++ for processors with AVX-512 and VNNI, compiled at first use; `auto`: these where they
can be had, torch's where not."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from bien.core.api import BienError, Context, Kernels, NoParameters, Provider, hookimpl

log = logging.getLogger("bien.kernels")


def make(config: NoParameters, ctx: Context) -> Kernels:
    from bien.plugins.kernels.native.kernels import NativeKernels

    return NativeKernels(ctx.threads)


def make_best(config: NoParameters, ctx: Context) -> Kernels:
    """Torch's too where the native ones would leave everything to them: other devices and data types."""
    from bien.core.api import TorchKernels

    if ctx.device != "cpu" or ctx.dtype != "float32":
        return TorchKernels()
    try:
        return make(config, ctx)
    except BienError as error:
        log.warning("torch's kernels are used: %s", error)
        return TorchKernels()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "kernels",
            "native",
            make,
            summary="C++ with AVX-512 VNNI: int8 and int4 products, paged attention; float32 on cpu, "
            "the rest is left to torch",
        ),
        Provider("kernels", "auto", make_best, summary="native where it can be compiled, torch elsewhere"),
    ]
