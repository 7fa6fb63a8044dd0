"""`BlockDrafter`: the device drafter of DFlash, DFlash 2 and DSpark checkpoints.

Imported by the factory only, since it needs torch.

A context entry depends on the tokens up to its own position and on no other (lookahead 0). It is written by
`absorb` alone; a block leaves nothing behind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import (
    Architecture,
    DeviceDraft,
    DrafterParts,
    Drawer,
    KVGroup,
    ModelError,
    SpeculatorCaps,
    TargetHandle,
)
from bien.plugins.speculators._network import load_tensors, vocabulary
from bien.plugins.speculators.dflash.calibration import scaled
from bien.plugins.speculators.dflash.form import BlockForm
from bien.plugins.speculators.dflash.heads import HEADS, Confidence, Markov, Selector
from bien.plugins.speculators.dflash.network import Backbone
from bien.plugins.speculators.dflash.tensors import COPIES, draft_groups, needed, seen, spare, taps

_PROBED = 64  # rows of a checkpoint's copy that are held against the target's own


class BlockDrafter:
    """See `DeviceSpeculator`."""

    def __init__(
        self,
        kind: str,
        form: BlockForm,
        max_drafts: int,
        window: int,
        temperatures: tuple[float, ...],
        *,
        sampled: bool,
    ) -> None:
        """`temperatures` of the confidences, one per draft of a block; empty: as they are."""
        self._kind, self._form, self._window, self._temperatures = kind, form, window, temperatures
        law = "sparse" if form.selector_rank else "dense"
        self.caps = SpeculatorCaps(
            place="device",
            max_drafts=max_drafts,
            taps=taps(form),
            deterministic=not sampled,
            q_kind=law if sampled else "onehot",  # type: ignore[arg-type]
            confidence="prior",
        )

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return draft_groups(self._kind, self._form, architecture, block_tokens, self._window)

    def load(self, target: TargetHandle, groups: tuple[int, ...], parts: DrafterParts) -> None:
        form = self._form
        tensors = load_tensors(form.folder, needed(form), spare(form), parts, self._kind)
        self._target = target
        self._embedding, self._output = (tensors.get(name) for name in COPIES)
        self._compared = False
        ids = vocabulary(tensors, form.draft_vocab or form.vocab, form.vocab, form.folder, self._kind)
        if ids is not None and not form.draft_vocab:
            if bool(tensors["d2t"].any()):  # the target's head, which may be used, has its own order
                raise ModelError(
                    f"{self._kind}: d2t of {form.folder} reorders the target's whole vocabulary; valid: "
                    "zeros, or a draft_vocab_size below vocab_size"
                )
            ids = None
        self._ids: Tensor | None = ids
        windows = [seen(w, self._window) for w in form.windows]
        sizes = sorted(set(windows))
        each = tuple(groups[sizes.index(w)] for w in windows)
        self._backbone = Backbone(form, tensors, each, parts)
        self._markov: Markov | None = HEADS[form.markov](tensors) if form.markov_rank else None
        self._selector = Selector(tensors, form) if form.selector_rank else None
        self._confidence: Confidence | None = None
        if form.confidence:
            words = self._markov.words if self._markov is not None and form.confidence_markov else None
            self._confidence = Confidence(tensors, words)

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        self._compare()
        self._backbone.fill([taps[tap] for tap in self.caps.taps], rows)

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        self._compare()
        form, limit = self._form, min(limit, self.caps.max_drafts)
        # The whole block, however few are wanted: slots see one another.
        block = last.new_full((len(last), form.block), form.mask, dtype=torch.int64)
        block[:, 0] = last
        words = self._embed(block.flatten()).view(*block.shape, -1) * form.embed_scale
        hidden = self._backbone(words, rows)
        first = 0 if form.from_anchor else 1
        hidden = hidden[:, first : first + limit]
        logits = self._logits(hidden)
        before, tokens, chances = last, [], []
        state = None if self._markov is None else self._markov.start(hidden[:, 0])
        for k in range(limit):
            scores, ids = logits[:, k], self._ids
            if self._markov is not None:
                bias, state = self._markov.step(before, hidden[:, k], state)
                scores = scores + bias
            if self._selector is not None:
                scores, ids = self._selector.step(before, hidden[:, k], scores)
            chances.append(self._chance(k, before, hidden[:, k], scores))
            before = drawer.draw(scores, ids)
            tokens.append(before)
        return DeviceDraft(torch.stack(tokens, 1), torch.stack(chances, 1))

    def close(self) -> None:
        for name in ("_target", "_backbone", "_markov", "_selector", "_confidence", "_embedding", "_output"):
            self.__dict__.pop(name, None)

    def _chance(self, k: int, before: Tensor, hidden: Tensor, scores: Tensor) -> Tensor:
        # Known before the draft is drawn, whatever it will be: without a head, the largest probability.
        if self._confidence is not None:
            chance = self._confidence(before, hidden)
        else:
            chance = scores.float().softmax(-1).amax(-1)
        return scaled(chance.float(), self._temperatures[k]) if self._temperatures else chance.float()

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is None:
            return self._target.embed(tokens)
        return F.embedding(tokens, self._embedding)

    def _logits(self, hidden: Tensor) -> Tensor:
        form, flat = self._form, hidden.flatten(0, 1)
        logits = self._target.project(flat) if self._output is None else F.linear(flat, self._output)
        if form.logit_scale != 1:
            logits = logits * form.logit_scale
        if form.soft_cap:
            logits = (logits / form.soft_cap).tanh() * form.soft_cap
        return logits.view(*hidden.shape[:2], -1)

    def _compare(self) -> None:
        # Most copies of the target's embedding and output head are just that: the target's serve as well.
        # They are held against it in a step, where all ranks of a model meet.
        if self._compared:
            return
        self._compared = True
        if (own := self._embedding) is not None:
            some = torch.arange(min(_PROBED, len(own)), device=own.device)
            if _alike(self._target.embed(some), own[some]):
                self._embedding = None
        if (own := self._output) is not None and not self._form.draft_vocab:
            some = torch.arange(min(_PROBED, own.shape[1]), device=own.device)
            probe = F.one_hot(some, own.shape[1]).to(own)
            if _alike(self._target.project(probe), F.linear(probe, own)):
                self._output = None


def _alike(theirs: Tensor, own: Tensor) -> bool:
    # As far as other precisions go.
    return float((theirs.float() - own.float()).norm()) < 0.05 * float(own.float().norm())
