"""Quantizer `int4`: weights of four bits, in groups along the input with a scale and an offset each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from bien.core.api import Context, Provider, Quantizer, hookimpl


class Int4Config(msgspec.Struct, forbid_unknown_fields=True):
    """`group`: weights that share a scale and an offset (two float16): 32 costs 5 bits per weight, 128 4.25;
    a layer whose width it does not divide takes the largest smaller one that does. `head`: format of the
    output head; the embedding stays in full precision."""

    group: Literal[32, 64, 128] = 32
    head: Literal["int8", "int4", "none"] = "int8"

    def bytes_per_parameter(self, name: str, item: int) -> float | None:
        """See `WeightSizes`."""
        kind = "int4" if name == "layers" else self.head
        return {"int4": 0.5 + 4 / self.group, "int8": 1.02, "none": None}[kind]


def make(config: Int4Config, ctx: Context) -> Quantizer:
    from bien.core.api import TorchKernels
    from bien.plugins.quantizers.int4.linear import Int4Quantizer

    kernels = ctx.parts.get("kernels") or TorchKernels()
    return Int4Quantizer(kernels, group=config.group, head=config.head)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "quantizer",
            "int4",
            make,
            Int4Config,
            summary="weights of 4 bits per group with scale and offset; activations full, or int8 per group",
        )
    ]
