"""`Architecture`: what the engine, the simulator and `inspect` know of a model without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from bien.core.architectures.weights import Weight, active, flops
from bien.core.kv.groups import KVGroup


class AttentionCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one token's attention costs in `layers` layers, beside the products with weights."""

    layers: int
    per_position: int  # floating-point operations per position that is looked at
    cap: int = 0  # at most so many positions are (window, top-k); 0: all
    constant: int = 0  # per token, whatever the context (recurrent states)

    def flops(self, context: int) -> int:
        seen = min(context, self.cap) if self.cap else context
        return self.layers * (self.constant + self.per_position * seen)


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model. `groups` carries the KV declaration at `block_tokens` of the deployment."""

    name: str  # architecture, e.g. "llama"
    model: str  # model name or folder
    layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int = 0  # total, embeddings included, tied head counted once
    eos_token_ids: tuple[int, ...] = ()
    groups: tuple[KVGroup, ...] = ()
    config: dict[str, Any] = {}  # the checkpoint's own fields, for the torch module
    weights: tuple[Weight, ...] = ()  # every tensor of the checkpoint
    attention: tuple[AttentionCost, ...] = ()
    unread: tuple[str, ...] = ()  # paths of the config's fields that the reader did not ask for

    @property
    def active_parameters(self) -> int:
        """What one token meets: of routed experts the chosen ones, the embedding whole."""
        return active(self.weights)

    def flops(self, context: int) -> int:
        """Floating-point operations of one token at this context, decoded alone."""
        return flops(self.weights) + sum(cost.flops(context) for cost in self.attention)


class ArchitectureReader(Protocol):
    """Reads a checkpoint's config strictly into an `Architecture` (provider kind "architecture").

    A missing field that decides the architecture is a `ModelError`, never a default.
    """

    model_types: tuple[str, ...]  # values of `model_type` in config.json that this reader takes

    def read(
        self, config: Mapping[str, Any], *, model: str, block_tokens: int, dtype: str
    ) -> Architecture: ...
