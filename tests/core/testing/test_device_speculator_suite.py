"""Each planted fault of a device drafter must be caught."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.testing.device_speculator import DeviceSpeculatorSuite
from bien.core.testing.suites import failures
from bien.plugins.speculators.early_exit import EarlyExit, EarlyExitConfig


class Good(EarlyExit):
    def __init__(self) -> None:
        super().__init__(EarlyExitConfig(layers=2, max_drafts=3))


class IgnoresLimit(Good):
    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        return super().propose(rows, last, 3)


class LeavesTheVocabulary(Good):
    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        return super().propose(rows, last, limit) + 200


class Floats(Good):
    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        return super().propose(rows, last, limit).double()


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

    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        return torch.full((len(last), limit), next(self.counter) % 200)


class AbsorbsPromptsOnly(Good):
    """Takes every forward that does not begin at 0 for a verify round."""

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor]) -> None:
        if (rows.starts == 0).all():
            super().absorb(rows, taps)


class AbsorbsDecodesNever(Good):
    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor]) -> None:
        if rows.counts.max() > 1:
            super().absorb(rows, taps)


class CountsRows(Good):
    """Keeps state by the row's place in the batch instead of its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, int] = {}

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor]) -> None:
        super().absorb(rows, taps)
        for i in range(len(rows.slots)):
            self.last[i] = int(rows.slots[i]) * 7 + int(rows.counts[i])

    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        offset = torch.tensor([self.last.get(i, 0) for i in range(len(last))])
        return (super().propose(rows, last, limit) + offset[:, None]) % 288


class RemembersTheSlot(Good):
    """What it absorbed for a slot outlives the sequence there."""

    def __init__(self) -> None:
        super().__init__()
        self.longest: dict[int, int] = {}

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor]) -> None:
        super().absorb(rows, taps)
        for slot, end in zip(rows.slots.tolist(), (rows.starts + rows.counts).tolist(), strict=True):
            self.longest[slot] = max(end, self.longest.get(slot, 0))

    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        offset = torch.tensor([self.longest.get(s, 0) for s in rows.slots.tolist()])
        return (super().propose(rows, last, limit) + offset[:, None]) % 288


class OffByOne(Good):
    """Puts the last token behind its own position: a hole is read."""

    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        return super().propose(rows.next(last), last, limit)


class WritesTheTargetsGroup(Good):
    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        hidden = self._loaded.embed(last)
        for layer in self._layers():
            hidden = layer(hidden, rows)
        return self._loaded.head(hidden).argmax(-1)[:, None].expand(-1, limit)


class ChangesTaps(Good):
    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor]) -> None:
        super().absorb(rows, taps)
        taps[1, "in"].mul_(0.5)


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
}


def suite(drafter: type[Good]) -> type[DeviceSpeculatorSuite]:
    return type("Suite", (DeviceSpeculatorSuite,), {"build": lambda self: drafter()})


def test_early_exit_conforms() -> None:
    assert failures(suite(Good)) == []


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda c: c.__name__)
def test_fault_is_caught(fault: type[Good]) -> None:
    names = [line.split(":")[0] for line in failures(suite(fault))]
    assert f"test_{CAUGHT[fault]}" in names
