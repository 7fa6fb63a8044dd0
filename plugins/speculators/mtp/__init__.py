"""Speculator "mtp": the layers that the target was trained with to predict further tokens.

DeepSeek-AI, "DeepSeek-V3" (2024), section 2.2. An entry of a layer pairs the token at p with the state of
the depth before at p - 1, and lies at p, so that it depends on no later token and a cached prefix is whole
for the drafter too. The layer of depth d has none before position d. The last states of a block are kept
beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
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
    boundary_group,
    drafting_groups,
    hookimpl,
)
from bien.plugins.speculators._folder import draft_group
from bien.plugins.speculators.mtp.form import KIND, Form, read_form

if TYPE_CHECKING:
    from torch import Tensor

    from bien.core.api import Rows

SERVED = ([GroupKind.FULL], [GroupKind.LATENT], [GroupKind.LATENT, GroupKind.INDEXER])
Positive = Annotated[int, msgspec.Meta(ge=1)]


class MtpConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`path`: a folder with such a layer of its own; None: the target's folder has the layers. A single one
    is used again for every further draft, of several each drafts one. `sampled`: drafts are drawn, not the
    most likely ones."""

    path: str | None = None
    max_drafts: Positive = 3
    sampled: bool = False

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return Mtp(self, architecture).groups(architecture, block_tokens)


class Mtp:
    """See `DeviceSpeculator`."""

    def __init__(self, config: MtpConfig, target: Architecture) -> None:
        """ModelError for a folder that holds no such layer; DeploymentError for a target that has none, or
        fewer than drafts."""
        self.form: Form | None = None if config.path is None else read_form(Path(config.path))
        self.depth = _depth(config, target) if self.form is None else 1
        self.caps = SpeculatorCaps(
            place="device",
            max_drafts=config.max_drafts,
            taps=((target.layers - 1, "out"),),
            lookahead=1,
            deterministic=not config.sampled,
            q_kind="dense" if config.sampled else "onehot",
            confidence="own",
        )
        self._names = () if self.form is not None else tuple(g.name for g in target.groups)
        self._groups: dict[str, int] = {}  # of the entries; "": a layer's first
        self._states: tuple[int, ...] = ()
        self._modules: list[Any] = []

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        """Entries, as in the target's own groups where the layers are its own, then a state per depth."""
        first, width = architecture.groups[0], architecture.hidden_size
        if self.form is None:
            own = drafting_groups(architecture)
        else:
            self.form.check(architecture)
            own = (draft_group(KIND, self.form.layer.entry, 1, first),)
        states = (f"{KIND}-state-{i}" for i in range(self.depth))
        made = (*own, *(boundary_group(name, width, block_tokens, first.dtype) for name in states))
        return tuple(msgspec.structs.replace(g, block_tokens=block_tokens) for g in made)

    def load(self, target: TargetHandle, groups: tuple[int, ...], parts: DrafterParts) -> None:
        entries, self._states = groups[: -self.depth], groups[-self.depth :]
        self._groups = {"": entries[0], **dict(zip(self._names, entries, strict=False))}
        if self.form is None:
            self._modules = parts.load_predicting()
        else:
            from bien.plugins.speculators.mtp.network import Module

            self._modules = [Module(self.form, target, parts)]

    def absorb(self, rows: Rows, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        from bien.plugins.speculators._network import shifted

        state = self._modules[0].first_state(taps[self.caps.taps[0]])
        for depth, (module, kept) in enumerate(zip(self._modules, self._states, strict=True)):
            before = shifted(state, rows.load_boundary(kept), rows)
            rows.store_boundary(kept, state, confirmed)
            if depth + 1 == self.depth:
                module.fill(before, rows.ids, self._own(rows, depth))
            else:
                state = module(before, rows.ids, self._own(rows, depth))

    def propose(self, rows: Rows, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        import torch

        from bien.plugins.speculators._network import chances

        limit = min(limit, self.caps.max_drafts)
        draft = self._again if self.depth == 1 else self._each
        drafts: list[Tensor] = []
        taken: list[Tensor] = []
        for logits in draft(rows, last, limit, drafts):
            drafts.append(drawer.draw(logits))
            taken.append(chances(logits, drafts[-1]))
        return DeviceDraft(torch.stack(drafts, 1), torch.stack(taken, 1))

    def close(self) -> None:
        self._modules = []

    def _again(self, rows: Rows, last: Tensor, limit: int, drafts: list[Tensor]) -> Iterator[Tensor]:
        # One layer: what it made of a position is the state before the next one.
        (module,) = self._modules
        state, tokens = rows.load_boundary(self._states[0]), last
        for _ in range(limit):
            state = module(state, tokens, self._own(rows, 0))
            yield module.head(state)
            tokens = drafts[-1]
            rows = rows.next(tokens)

    def _each(self, rows: Rows, last: Tensor, limit: int, drafts: list[Tensor]) -> Iterator[Tensor]:
        # A layer per draft. That of depth d has seen nothing from the last token on: it computes the
        # positions there, from what the layer before it has just made of them.
        made: list[Tensor] = []
        for depth, module in enumerate(self._modules[:limit]):
            at, states = rows, [rows.load_boundary(self._states[depth]), *made]
            made = []
            for state, tokens in zip(states, [last, *drafts], strict=True):
                made.append(module(state, tokens, self._own(at, depth)))
                at = at.next(tokens)
            yield module.head(made[-1])

    def _own(self, rows: Rows, depth: int) -> Rows:
        named = {name: group for name, group in self._groups.items() if name}
        return rows.redirect(self._groups[""], skip=depth + 1, **named)


def _depth(config: MtpConfig, target: Architecture) -> int:
    # Of the layers in the target's own folder.
    depth = int(target.config.get("num_nextn_predict_layers") or 0)
    kinds = [g.kind for g in target.groups]
    if not depth:
        raise DeploymentError(
            f"mtp: {target.model!r} ({target.name}) has no layers for further tokens (its config has no "
            "num_nextn_predict_layers above 0); give the path of a folder that has one, or choose another "
            "speculator",
            field="path",
        )
    if kinds not in SERVED:
        found = ", ".join(k.value for k in kinds)
        raise DeploymentError(
            f"mtp: {target.model!r} caches in groups of kind {found}, as its layers for further tokens do; "
            "those of full attention, and of latents with or without an indexer, are served"
        )
    if depth > 1 and config.max_drafts > depth:
        raise DeploymentError(
            f"mtp: max_drafts = {config.max_drafts}, but {target.model!r} has {depth} layers for further "
            f"tokens, each for one draft; valid: 1 to {depth}",
            field="max_drafts",
        )
    return depth


def _make(config: MtpConfig, ctx: Context) -> Mtp:
    if ctx.architecture is None:
        raise DeploymentError("mtp: the target is not known; its layers, or their number, are needed")
    return Mtp(config, ctx.architecture)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            "mtp",
            _make,
            MtpConfig,
            summary="the target's own layers for further tokens draft: GLM, DeepSeek, speculators (device)",
        )
    ]
