"""From a scheduler's plan to an executor's: checked, booked on the sequences, packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bien.core.admission import Admission
from bien.core.errors import PluginFault
from bien.core.flight import Flight, FlightItem
from bien.core.kv.groups import KVGroup
from bien.core.plan import ExecutorPlan, StepPlan, TableUpdate, i32
from bien.core.sequence import Sequence, Status
from bien.core.snapshots import Snapshots
from bien.core.speculation.draft import ROOT
from bien.core.speculation.lengths import depths


def check_plan(plan: StepPlan, sequences: Mapping[str, Sequence], scheduler: str) -> None:
    """PluginFault unless the plan keeps every promise of `Scheduler.plan`."""
    who = f"scheduler {scheduler} planned"
    seen: set[int] = set()
    for item in plan.items:
        s = item.sequence
        if s.status is not Status.RUNNING or sequences.get(s.id) is not s:
            raise PluginFault(f"{who} {s.id!r}, which is {s.status.name}, not RUNNING")
        if id(s) in seen:
            raise PluginFault(f"{who} {s.id!r} twice in one step")
        seen.add(id(s))
        new = item.tokens - item.drafts
        if not 1 <= new <= s.pending or not 0 <= item.drafts <= s.drafts:
            raise PluginFault(
                f"{who} {item.tokens} tokens with {item.drafts} drafts for {s.id!r}; "
                f"valid: 1..{s.pending} tokens, 0..{s.drafts} drafts"
            )
        if item.drafts and new != s.pending:
            raise PluginFault(f"{who} drafts behind an unfinished chunk of {s.id!r}")
        if s.reserved < s.planned + item.tokens:
            raise PluginFault(f"{who} {s.id!r} without reserving {item.tokens} tokens")


@dataclass(slots=True)
class _Drafts:
    """Of all rows of a plan, as `ExecutorPlan` has them."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    trees: bool = False

    def add(self, row: FlightItem) -> None:
        s, count = row.sequence, row.drafts
        row.depth, row.source = count, s.draft.source
        if s.hosted:
            self.tokens += s.draft.tokens[:count]
        if s.draft.parents is None:
            self.parents += range(ROOT, count + ROOT)
            return
        parents = s.draft.parents[:count]
        row.depth = max(depths(count, parents))
        self.parents += parents
        self.trees = True


class Launcher:
    """Books a checked plan on its sequences and packs the differences that the executor needs."""

    def __init__(
        self,
        admission: Admission,
        snapshots: Snapshots,
        groups: tuple[KVGroup, ...],
        device_drafts: bool,
    ) -> None:
        """`device_drafts`: a device drafter proposes."""
        self._admission = admission
        self._snapshots = snapshots
        self._groups = groups
        self.tables = True  # False: whoever runs the plans keeps no KV and reads no tables
        self._device = device_drafts

    def launch(self, step: int, plan: StepPlan) -> tuple[Flight, ExecutorPlan]:
        """The step in flight, and the plan to send."""
        items: list[FlightItem] = []
        slots, starts, counts, drafts, samples = [], [], [], [], []
        packed = _Drafts()
        for item in plan.items:
            s = item.sequence
            sampling = item.tokens - item.drafts == s.pending
            slots.append(s.slot)
            starts.append(s.planned)
            counts.append(item.tokens)
            drafts.append(item.drafts)
            samples.append(int(sampling))
            row = FlightItem(s, s.epoch, s.planned, item.tokens, item.drafts, sampling)
            if item.drafts:
                packed.add(row)
            items.append(row)
            self._book(s, item.tokens, item.drafts, sampling)
        restores = self._admission.take_restores()
        snapshots = self._snapshots.plan(items)
        rows = np.array((slots, starts, counts, drafts, samples), np.int32)  # one call for all is cheaper
        return Flight(step, items, sum(counts)), ExecutorPlan(
            step=step,
            slots=rows[0],
            starts=rows[1],
            counts=rows[2],
            drafts=rows[3],
            samples=rows[4],
            new=self._admission.take_new(),
            released=i32(self._admission.take_released()),
            tables=self._tables(),
            restores=restores,
            snapshots=snapshots,
            draft_tokens=i32(packed.tokens),
            device_drafts=self._device,
            hosted=i32(self._hosted(items) if packed.tokens else None),
            parents=i32(packed.parents if packed.trees else None),
        )

    def _hosted(self, items: list[FlightItem]) -> list[int]:
        return [row.drafts if row.sequence.hosted else 0 for row in items] if self._device else []

    def _book(self, s: Sequence, tokens: int, drafts: int, sampling: bool) -> None:
        s.planned += tokens
        if sampling:
            s.promised += 1
            # A drafter needs the confirmed token: such a sequence waits for its step to end.
            s.syncs = drafts > 0 or s.max_drafts > 0
        s.drafts = s.ready = 0

    def _tables(self) -> list[TableUpdate]:
        if not self.tables:
            self._admission.take_dirty()
            return []
        dirty = [(s.slot, s.kv) for s in self._admission.take_dirty() if s.kv is not None and s.slot >= 0]
        out = []
        for g in range(len(self._groups)):
            parts = [(slot, *kv.take_update_arrays(g)) for slot, kv in dirty]
            parts = [p for p in parts if len(p[1])]
            if not parts:
                out.append(TableUpdate(i32(), i32(), i32()))
                continue
            if len(parts) == 1:
                slot, places, ids = parts[0]
                slots = np.full(len(ids), slot, np.int32)
                out.append(TableUpdate(slots, places.astype(np.int32), ids.astype(np.int32)))
                continue
            slots = np.concatenate([np.full(len(index), slot, np.int32) for slot, index, _ in parts])
            index = np.concatenate([p[1] for p in parts]).astype(np.int32, copy=False)
            blocks = np.concatenate([p[2] for p in parts]).astype(np.int32, copy=False)
            out.append(TableUpdate(slots, index, blocks))
        return out
