"""`Formats`: in what formats weights and caches are kept and multiplied."""

from __future__ import annotations

import msgspec

from bien.core.costs.machine import WIDER
from bien.core.errors import UserError, nearest

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.53125}
"""Bytes per element, scales included (FP4: one byte per 16; int4: two per 128)."""


class Formats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weights: str = "bf16"  # linear layers
    routed: str = ""  # routed experts; "": like weights
    kv: str = "bf16"  # cached entries
    head: str = "bf16"  # embedding and output head

    def of(self, role: str) -> str:
        """The format of weights of a role."""
        if role == "routed":
            return self.routed or self.weights
        if role in ("embedding", "head"):
            return self.head
        return "bf16" if role in ("norm", "router", "indexer") else self.weights

    def check(self) -> None:
        """UserError for a format that is unknown."""
        for name in ("weights", "routed", "kv", "head"):
            kind = getattr(self, name)
            if kind not in WIDER and not (name == "routed" and not kind):
                raise UserError(f"{name} = {kind!r} is no format; {nearest(kind, WIDER)}", field=name)
