"""Speculator "early-exit": the target's first layers, then its own final norm and head, draft.

Elhoushi et al., "LayerSkip" (2024), without its training: any model drafts, those trained for early exits
draft well. The drafter keeps keys and values of its own (a DRAFT group, cached like the target's), filled
after each forward of the target from the states that entered those layers: keys and values of prompts,
chunks and verified tokens cost it two projections each, never a forward of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from bien.core.api import (
    Architecture,
    Context,
    DeploymentError,
    DeviceDraft,
    DrafterParts,
    Drawer,
    GroupKind,
    KVGroup,
    Provider,
    SpeculatorCaps,
    TargetHandle,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor


class EarlyExitConfig(msgspec.Struct, forbid_unknown_fields=True):
    layers: Annotated[int, msgspec.Meta(ge=1)] = 6
    max_drafts: Annotated[int, msgspec.Meta(ge=1)] = 3
    # Drafts are drawn at the request's temperature instead of taken greedily: with verification by rejection,
    # or with Gumbel noise, more of them are accepted in sampled text.
    sampled: bool = False

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return EarlyExit(self).groups(architecture, block_tokens)


class EarlyExit:
    def __init__(self, config: EarlyExitConfig) -> None:
        self.depth = config.layers
        self.caps = SpeculatorCaps(
            place="device",
            max_drafts=config.max_drafts,
            taps=tuple((i, "in") for i in range(config.layers)),
            deterministic=not config.sampled,
            q_kind="dense" if config.sampled else "onehot",
        )
        self._target: TargetHandle | None = None
        self._group = -1

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        """One group over the first layers. DeploymentError where these are not plain attention."""
        usable = _leading_attention(architecture)
        if self.depth > usable:
            cause = "the others are not full attention" if usable < architecture.layers else "it has no more"
            raise DeploymentError(
                f"early-exit: layers = {self.depth}, but of the {architecture.layers} layers of "
                f"{architecture.model!r} ({architecture.name}) only the first {usable} can draft: {cause}"
                + (f"; valid: 1 to {usable}" if usable else "; choose another speculator"),
                field="layers",
            )
        source = next(g for g in architecture.groups if 0 in g.layers)
        return (
            KVGroup(
                "draft",
                GroupKind.DRAFT,
                tuple(range(self.depth)),
                block_tokens,
                bytes_per_token=source.bytes_per_token // len(source.layers) * self.depth,
                dtype=source.dtype,
            ),
        )

    def load(self, target: TargetHandle, groups: tuple[int, ...], parts: DrafterParts) -> None:
        (self._group,) = groups
        self._target = target
        for i, layer in enumerate(target.layers[: self.depth]):
            if not hasattr(layer, "fill"):
                raise DeploymentError(
                    f"early-exit: layer {i} of the target ({type(layer).__name__}) cannot fill keys and "
                    "values alone (no `fill`); choose another speculator"
                )

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        own = rows.redirect(self._group)
        for i, layer in enumerate(self._layers()):
            layer.fill(taps[i, "in"], own)

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        import torch

        drafts: list[Tensor] = []
        tokens = last
        rows = rows.redirect(self._group)
        for j in range(min(limit, self.caps.max_drafts)):
            if j:
                rows = rows.next(tokens)
            hidden = self._loaded.embed(tokens)
            for layer in self._layers():
                hidden = layer(hidden, rows)
            tokens = drawer.draw(self._loaded.head(hidden))
            drafts.append(tokens)
        return DeviceDraft(torch.stack(drafts, 1))

    def close(self) -> None:
        self._target = None

    @property
    def _loaded(self) -> TargetHandle:
        assert self._target is not None, "load comes before absorb and propose"
        return self._target

    def _layers(self) -> list[Any]:
        return self._loaded.layers[: self.depth]


def _leading_attention(architecture: Architecture) -> int:
    # How many layers from the first on lie in one FULL group.
    first = next((g for g in architecture.groups if 0 in g.layers), None)
    if first is None or first.kind is not GroupKind.FULL:
        return 0
    return next(i for i in range(architecture.layers + 1) if i not in first.layers)


def _make(config: EarlyExitConfig, ctx: Context) -> EarlyExit:
    return EarlyExit(config)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            "early-exit",
            _make,
            EarlyExitConfig,
            summary="drafts with the target's first layers and its head, in the executor (device)",
        )
    ]
