"""Each planted fault of a device drafter must be caught."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.speculation.speculator import DeviceDraft, Drawer
from bien.core.testing.device_speculator import DeviceSpeculatorSuite
from bien.core.testing.suites import failures
from bien.plugins.speculators.early_exit import EarlyExit, EarlyExitConfig


class Good(EarlyExit):
    def __init__(self) -> None:
        super().__init__(EarlyExitConfig(layers=2, max_drafts=3))


class Sampled(EarlyExit):
    def __init__(self) -> None:
        super().__init__(EarlyExitConfig(layers=2, max_drafts=3, sampled=True))


def changed(draft: DeviceDraft, offset: Any) -> DeviceDraft:
    return DeviceDraft((draft.tokens + offset) % (288 if torch.is_tensor(offset) else 1000))


class IgnoresLimit(Good):
    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        return super().propose(rows, last, 3, drawer)


class LeavesTheVocabulary(Good):
    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        return changed(super().propose(rows, last, limit, drawer), 200)


class Floats(Good):
    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        draft = super().propose(rows, last, limit, drawer)
        return DeviceDraft(draft.tokens.double())


class TapsTooHigh(Good):
    def __init__(self) -> None:
        super().__init__()
        self.caps = msgspec.structs.replace(self.caps, taps=((0, "in"), (1, "in"), (4, "in")))


class UsesFullGroup(Good):
    def groups(self, architecture: Any, block_tokens: int) -> tuple[KVGroup, ...]:
        (group,) = super().groups(architecture, block_tokens)
        return (msgspec.structs.replace(group, kind=GroupKind.FULL),)


class OwnBlockSize(Good):
    def groups(self, architecture: Any, block_tokens: int) -> tuple[KVGroup, ...]:
        return super().groups(architecture, 16)


class Random(Good):
    counter = itertools.count()

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        return DeviceDraft(torch.full((len(last), limit), next(self.counter) % 200))


class AbsorbsPromptsOnly(Good):
    """Takes every forward that does not begin at 0 for a verify round."""

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        if (rows.starts == 0).all():
            super().absorb(rows, taps, confirmed)


class AbsorbsDecodesNever(Good):
    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        if rows.counts.max() > 1:
            super().absorb(rows, taps, confirmed)


class CountsRows(Good):
    """Keeps state by the row's place in the batch instead of its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, int] = {}

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        super().absorb(rows, taps, confirmed)
        for i in range(len(rows.slots)):
            self.last[i] = int(rows.slots[i]) * 7 + int(rows.counts[i])

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        offset = torch.tensor([self.last.get(i, 0) for i in range(len(last))])
        return changed(super().propose(rows, last, limit, drawer), offset[:, None])


class RemembersTheSlot(Good):
    """What it absorbed for a slot outlives the sequence there."""

    def __init__(self) -> None:
        super().__init__()
        self.longest: dict[int, int] = {}

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        super().absorb(rows, taps, confirmed)
        for slot, end in zip(rows.slots.tolist(), (rows.starts + rows.counts).tolist(), strict=True):
            self.longest[slot] = max(end, self.longest.get(slot, 0))

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        offset = torch.tensor([self.longest.get(s, 0) for s in rows.slots.tolist()])
        return changed(super().propose(rows, last, limit, drawer), offset[:, None])


class OffByOne(Good):
    """Puts the last token behind its own position: a hole is read."""

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        return super().propose(rows.next(last), last, limit, drawer)


class WritesTheTargetsGroup(Good):
    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        hidden = self._loaded.embed(last)
        for layer in self._layers():
            hidden = layer(hidden, rows)
        return DeviceDraft(self._loaded.head(hidden).argmax(-1)[:, None].expand(-1, limit))


class ChangesTaps(Good):
    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        super().absorb(rows, taps, confirmed)
        taps[1, "in"].mul_(0.5)


class DrawsByItself(Sampled):
    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        return changed(super().propose(rows, last, limit, drawer), torch.tensor(1))


class Confident(Good):
    """Reports confidences, of a kind that its caps say."""

    kind = "own"

    def __init__(self) -> None:
        super().__init__()
        self.caps = msgspec.structs.replace(self.caps, confidence=self.kind)  # type: ignore[call-overload]

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        draft = super().propose(rows, last, limit, drawer)
        return DeviceDraft(draft.tokens, draft.tokens / 288)


class KnowsItsToken(Confident):
    kind = "prior"


class HidesConfidence(Confident):
    kind = "none"


class TooConfident(Confident):
    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        draft = super().propose(rows, last, limit, drawer)
        return DeviceDraft(draft.tokens, draft.tokens + 1.0)


class TreeInAChain(Good):
    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        draft = super().propose(rows, last, limit, drawer)
        return DeviceDraft(draft.tokens, None, torch.full_like(draft.tokens, -1))


class EntriesKnowTheNextToken(Good):
    """Keeps the entry of a position with the token behind it, as in the reference of EAGLE: the last entry of
    a shared block is that of another text."""

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        behind = self._loaded.embed(torch.roll(rows.ids, -1)) * 30
        super().absorb(rows, {tap: x + behind for tap, x in taps.items()}, confirmed)


CAUGHT = {
    IgnoresLimit: "shape_and_range",
    LeavesTheVocabulary: "shape_and_range",
    Floats: "shape_and_range",
    TapsTooHigh: "caps",
    UsesFullGroup: "groups_are_drafters_groups",
    OwnBlockSize: "groups_are_drafters_groups",
    Random: "deterministic_as_declared",
    AbsorbsPromptsOnly: "chunks_do_not_matter",
    AbsorbsDecodesNever: "chunks_do_not_matter",
    CountsRows: "company_does_not_matter",
    RemembersTheSlot: "a_slot_is_used_again",
    OffByOne: "reads_no_position_that_was_not_written",
    WritesTheTargetsGroup: "leaves_the_target_alone",
    ChangesTaps: "leaves_the_target_alone",
    DrawsByItself: "drafts_are_what_was_drawn",
    KnowsItsToken: "prior_confidences_do_not_know_their_token",
    HidesConfidence: "shape_and_range",
    TooConfident: "shape_and_range",
    TreeInAChain: "shape_and_range",
    EntriesKnowTheNextToken: "a_prefix_in_the_blocks_is_enough",
}


def suite(drafter: type[EarlyExit]) -> type[DeviceSpeculatorSuite]:
    return type("Suite", (DeviceSpeculatorSuite,), {"build": lambda self: drafter()})


@pytest.mark.parametrize("drafter", [Good, Sampled, Confident])
def test_early_exit_conforms(drafter: type[EarlyExit]) -> None:
    assert failures(suite(drafter)) == []


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda c: c.__name__)
def test_fault_is_caught(fault: type[EarlyExit]) -> None:
    names = [line.split(":")[0] for line in failures(suite(fault))]
    assert f"test_{CAUGHT[fault]}" in names
