"""Quantizer `int8`: weights per output channel, activations per token, both symmetric."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bien.core.api import Context, Provider, Quantizer, hookimpl


class Int8Config(msgspec.Struct, forbid_unknown_fields=True):
    """Linear layers are always int8; the output head (with tied weights also the embedding's) only with
    `head`: it decides between near-equal tokens and keeps its full-precision copy for the embedding."""

    head: bool = False

    def bytes_per_parameter(self, name: str, item: int) -> float | None:
        return None if name == "lm_head" and not self.head else 1.0


def make(config: Int8Config, ctx: Context) -> Quantizer:
    from bien.core.api import TorchKernels
    from bien.plugins.quantizers.int8.linear import Int8Quantizer

    return Int8Quantizer(ctx.parts.get("kernels") or TorchKernels(), head=config.head)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "quantizer",
            "int8",
            make,
            Int8Config,
            summary="int8 products: weights per channel, activations per token",
        )
    ]
