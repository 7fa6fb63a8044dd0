"""Speculator "draft-model": a small model of the same vocabulary, with keys and values of its own.

It needs no hidden states of the target and no training for it: Leviathan et al., "Fast inference from
transformers via speculative decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    ModelError,
    Provider,
    SpeculatorCaps,
    TargetHandle,
    hookimpl,
    read_architecture,
)

if TYPE_CHECKING:
    from torch import Tensor

    from bien.core.api import Rows

SERVED = (GroupKind.FULL, GroupKind.WINDOW, GroupKind.LATENT)


class DraftModelConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`model`: a folder, a GGUF file or a built-in name. `sampled`: drafts are drawn from its distribution,
    not the most likely ones."""

    model: str
    max_drafts: Annotated[int, msgspec.Meta(ge=1)] = 4
    sampled: bool = True

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return DraftModel(self, architecture).groups(architecture, block_tokens)


class DraftModel:
    """See `DeviceSpeculator`. Every confirmed token goes through the whole small model once more, in
    `absorb`: what it wrote while it drafted is overwritten."""

    def __init__(self, config: DraftModelConfig, target: Architecture) -> None:
        """`target`: whose tokenizer must be the same."""
        self._config, self._target, self._vocab = config, target.model, target.vocab_size
        self.caps = SpeculatorCaps(
            place="device",
            max_drafts=config.max_drafts,
            deterministic=not config.sampled,
            q_kind="dense" if config.sampled else "onehot",
            confidence="own",
        )
        self._model: Any = None
        self._group = -1

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        """DeploymentError for a model whose layers do not all cache alike."""
        own = read_architecture(self._config.model, block_tokens, architecture.groups[0].dtype)
        kinds = [g.kind for g in own.groups]
        if len(kinds) != 1 or kinds[0] not in SERVED:
            found = ", ".join(k.value for k in kinds)
            raise DeploymentError(
                f"draft-model: {self._config.model!r} caches in groups of kind {found}; needs one of "
                + " or ".join(k.value for k in SERVED),
                field="model",
            )
        if own.max_context < architecture.max_context:
            raise DeploymentError(
                f"draft-model: {self._config.model!r} knows {own.max_context} positions, the target is "
                f"served with {architecture.max_context}; lower max_context, or choose another drafter",
                field="model",
            )
        # Not divided among ranks: each computes the whole drafter.
        return (msgspec.structs.replace(own.groups[0], name="draft", kind=GroupKind.DRAFT, shardable=False),)

    def load(self, target: TargetHandle, groups: tuple[int, ...], parts: DrafterParts) -> None:
        """ModelError for another vocabulary."""
        (self._group,) = groups
        check_vocabulary(self._config.model, self._target)
        self._model = parts.load_model(self._config.model)

    def absorb(self, rows: Rows, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        self._model.forward(rows.ids, rows.redirect(self._group))

    def propose(self, rows: Rows, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        import torch

        from bien.plugins.speculators._network import chances

        tokens, drafts, taken = last, [], []
        for _ in range(min(limit, self.caps.max_drafts)):
            hidden, _ = self._model.forward(tokens, rows.redirect(self._group))
            logits = self._model.head(hidden)[:, : self._vocab]
            ids = None
            if logits.shape[1] < self._vocab:  # tables of one vocabulary may be padded differently
                ids = torch.arange(logits.shape[1], device=logits.device)
            tokens = drawer.draw(logits, ids)
            drafts.append(tokens)
            taken.append(chances(logits, tokens))
            rows = rows.next(tokens)
        return DeviceDraft(torch.stack(drafts, 1), torch.stack(taken, 1))

    def close(self) -> None:
        self._model = None


def check_vocabulary(drafter: str, target: str) -> None:
    """ModelError unless both models' tokenizers give every token the same id."""
    ours, theirs = (_words(name) for name in (drafter, target))
    for token, id in ours.items():
        if theirs.get(token) != id:
            other = "has no such token" if token not in theirs else f"calls it {theirs[token]}"
            raise ModelError(
                f"draft-model: {drafter!r} and the target have different vocabularies: token {token!r} is "
                f"{id} for the drafter, the target {other}; a drafter must share the target's tokenizer"
            )
    more = theirs.keys() - ours.keys()
    if more:
        raise ModelError(
            f"draft-model: {drafter!r} lacks {len(more)} of the target's {len(theirs)} tokens, such as "
            f"{min(more)!r}; a drafter must share the target's tokenizer"
        )


def _words(model: str) -> Mapping[str, int]:
    from bien.core.api import Tokenizer, resolve_model

    return Tokenizer.load(resolve_model(model)).words


def _make(config: DraftModelConfig, ctx: Context) -> DraftModel:
    if ctx.architecture is None:
        raise DeploymentError("draft-model: the target is not known; its vocabulary must be the drafter's")
    return DraftModel(config, ctx.architecture)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            "draft-model",
            _make,
            DraftModelConfig,
            summary="a small model of the same vocabulary drafts, with KV of its own (device)",
        )
    ]
