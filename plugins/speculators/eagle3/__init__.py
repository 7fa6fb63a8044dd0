"""Speculator "eagle3": a layer of its own, trained for the target, drafts from three of its hidden states.

An entry pairs the token at p with the target's states at p - 1, and lies at p: it depends on no later token,
so that a cached prefix is whole for the drafter too. Position 0 has none. The last states of a block are kept
beside it, for the first token of the next one. Keys and values of all entries follow from these pairs alone,
without attention: prompts cost a few projections per token, a round costs a pass per draft (or tree level).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from bien.core.api import (
    Architecture,
    Context,
    DeploymentError,
    DeviceDraft,
    DrafterParts,
    Drawer,
    KVGroup,
    Provider,
    SpeculatorCaps,
    TargetHandle,
    boundary_group,
    hookimpl,
)
from bien.plugins.speculators._folder import draft_group
from bien.plugins.speculators.eagle3.form import KIND, Form, read_form

if TYPE_CHECKING:
    from torch import Tensor

    from bien.core.api import Rows
    from bien.plugins.speculators.eagle3.network import Network

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Eagle3Config(msgspec.Struct, forbid_unknown_fields=True):
    """`max_drafts`: nodes of a round. Of a tree: `depth` levels at most, `top_k` nodes expanded on each, to
    `top_k` children each. `sampled`: drafts of a chain are drawn, not the most likely ones."""

    path: str
    max_drafts: Positive = 4
    topology: Literal["chain", "tree"] = "chain"
    sampled: bool = False
    depth: Positive = 6
    top_k: Positive = 8

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return Eagle3(self, architecture.layers).groups(architecture, block_tokens)


class Eagle3:
    """See `DeviceSpeculator`."""

    def __init__(self, config: Eagle3Config, layers: int) -> None:
        """`layers`: of the target. ModelError for a folder that holds no EAGLE-3 drafter."""
        if config.sampled and config.topology == "tree":
            raise DeploymentError(
                "eagle3: nodes of a tree are not drawn; sampled needs a chain", field="sampled"
            )
        self.form: Form = read_form(Path(config.path))
        self._config = config
        self.caps = SpeculatorCaps(
            place="device",
            max_drafts=config.max_drafts,
            taps=self.form.taps_of(layers),
            lookahead=1,
            deterministic=not config.sampled,
            q_kind="dense" if config.sampled else "onehot",
            topology=config.topology,
            confidence="own",
        )
        self._network: Network | None = None
        self._entries = self._states = -1

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        """DeploymentError for a target that the drafter was not made for."""
        self.form.check(architecture)
        like = msgspec.structs.replace(architecture.groups[0], block_tokens=block_tokens)
        layer = self.form.layer
        return (
            draft_group(KIND, layer.entry, 1, like),
            boundary_group(f"{KIND}-state", layer.hidden, block_tokens, like.dtype),
        )

    def load(self, target: TargetHandle, groups: tuple[int, ...], parts: DrafterParts) -> None:
        from bien.plugins.speculators.eagle3.network import Network

        self._entries, self._states = groups
        self._network = Network(self.form, target, parts)

    def absorb(self, rows: Rows, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        from bien.plugins.speculators._network import shifted

        network = self._loaded
        fused = network.fuse([taps[tap] for tap in self.caps.taps])
        before = shifted(fused, rows.load_boundary(self._states), rows)
        own = rows.redirect(self._entries, skip=1)
        own.write(0, network.entries(before, rows.ids, rows.positions))
        rows.store_boundary(self._states, fused, confirmed)

    def propose(self, rows: Rows, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        network, limit = self._loaded, min(limit, self.caps.max_drafts)
        states = rows.load_boundary(self._states)
        own = rows.redirect(self._entries, skip=1)
        if self.caps.topology == "tree":
            from bien.plugins.speculators.eagle3.tree import grow

            return grow(network, own, states, last, limit, self._config.depth, self._config.top_k)
        return _chain(network, own, states, last, limit, drawer)

    def close(self) -> None:
        self._network = None

    @property
    def _loaded(self) -> Network:
        assert self._network is not None, "load comes before absorb and propose"
        return self._network


def _chain(
    network: Network, rows: Rows, states: Tensor, last: Tensor, limit: int, drawer: Drawer
) -> DeviceDraft:
    import torch

    tokens, drafts, chances, entries = last, [], [], None
    for step in range(limit):
        positions = rows.positions + step
        query, entry, residual = network.enter(states, tokens, positions)
        entries = entry[:, None] if entries is None else torch.cat([entries, entry[:, None]], 1)
        mixed = rows.attend_block(
            0, query[:, None], entries, network.attention.scale, None, positions[:, None]
        )
        states, logits = network.leave(residual, mixed[:, 0])
        tokens = drawer.draw(logits, network.ids)
        drafts.append(tokens)
        chances.append(network.chance(logits, tokens))
    return DeviceDraft(torch.stack(drafts, 1), torch.stack(chances, 1))


def _make(config: Eagle3Config, ctx: Context) -> Eagle3:
    if ctx.architecture is None:
        raise DeploymentError("eagle3: the target is not known; its layers decide which states are read")
    drafter = Eagle3(config, ctx.architecture.layers)
    drafter.form.check(ctx.architecture)
    return drafter


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            "eagle3",
            _make,
            Eagle3Config,
            summary="EAGLE-3: a trained layer drafts chains or trees from the target's states (device)",
        )
    ]
