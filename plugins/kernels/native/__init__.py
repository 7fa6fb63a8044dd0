"""Kernels `native`: C++ for processors with AVX-512 and VNNI, compiled at first use."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import Context, Kernels, NoParameters, Provider, hookimpl


def make(config: NoParameters, ctx: Context) -> Kernels:
    from bien.plugins.kernels.native.kernels import NativeKernels

    return NativeKernels(ctx.threads)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "kernels",
            "native",
            make,
            summary="C++ with AVX-512 VNNI: int8 and int4 products, paged attention; float32 on cpu, "
            "the rest is left to torch",
        )
    ]
