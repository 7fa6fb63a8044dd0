"""`Driver`: hand-built plans for a torch executor, with the plainest block allocator there is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from bien.core.architectures.registry import read_architecture
from bien.core.executors.make import make_executor
from bien.core.logprobs import TokenLogprobs
from bien.core.plan import ExecutorPlan, NewSequence, StateCopy, TableUpdate, i32
from bien.core.providers import Context
from bien.core.request import SamplingParams, TokenIds
from bien.core.speculation.options import SpeculationSpec
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Sequences live in slots. `step` computes what it is told and keeps the logits of sampling rows."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        block_tokens: int = 8,
        blocks: int = 96,
        slots: int = 8,
        max_context: int = 512,
        shuffle: int | None = None,  # seed: blocks come in random order, so that no table is contiguous
        **parts: Any,
    ) -> None:
        architecture = read_architecture(folder, block_tokens, dtype)
        speculation = parts.pop("speculation", SpeculationSpec())
        parts = {"quantizer": NoQuantizer(), "parallel": Single(), **parts}
        self.executor = make_executor(
            Context(architecture=architecture, dtype=dtype, parts=parts, speculation=speculation)
        )
        self.groups = self.executor.groups
        self.executor.allocate(tuple(blocks for _ in self.groups), slots, max_context)
        self.free = [list(range(blocks, 0, -1)) for _ in self.groups]
        if shuffle is not None:
            for pool in self.free:
                random.Random(shuffle).shuffle(pool)
        self.tables: dict[int, list[list[int]]] = {}  # slot -> per group its blocks
        self.content: dict[int, list[int]] = {}  # slot -> known tokens
        self.computed: dict[int, int] = {}
        self.idle = list(range(slots - 1, -1, -1))
        self.logits: dict[int, np.ndarray[Any, Any]] = {}  # slot -> [1 + drafts, V] of the last step
        self.proposed: dict[int, int] = {}
        self.logprobs: dict[int, TokenLogprobs] = {}  # of the last step
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # the same of prompts
        self.steps = self.drafted = self.taken = 0
        self._new: list[NewSequence] = []
        self._released: list[int] = []
        self._updates: list[list[tuple[int, int, int]]] = [[] for _ in self.groups]
        self._restores: list[StateCopy] = []

    def add(
        self,
        tokens: list[int],
        *,
        prompt: int | None = None,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        forced: list[int] | None = None,
        like: tuple[int, int] | None = None,
        states: dict[int, int] | None = None,
        blocks: dict[int, list[int]] | None = None,
        max_drafts: int = 0,
        ends: tuple[int, ...] = (),
    ) -> int:
        """A sequence enters. `like` = (slot, n): its first n blocks are those of that slot (a prefix hit),
        `states` the snapshot block of each STATE group there. `blocks`: its first blocks of some groups."""
        slot = self.idle.pop()
        self.tables[slot] = [[] for _ in self.groups]
        self.content[slot], self.computed[slot] = list(tokens), 0
        if like is not None:
            other, n = like
            self.computed[slot] = n * self.groups[0].block_tokens
            blocks = {g: self.tables[other][g][:n] for g, group in enumerate(self.groups) if group.paged}
        for g, group in enumerate(self.groups):
            for block in (blocks or {}).get(g, []):
                self._append(slot, g, block)
            if not group.paged:
                self._append(slot, g, self.free[g].pop())
                source, live = (states or {}).get(g, 0), self.tables[slot][g][0]
                self._restores.append(StateCopy(g, slot, self.computed[slot], source, live))
        given = None if forced is None else TokenIds.of(forced)
        self._new.append(
            NewSequence(
                slot, TokenIds.of(tokens), prompt or len(tokens), sampling, seed, given, max_drafts, ends
            )
        )
        return slot

    def release(self, slot: int) -> list[int]:
        """The sequence leaves (blocks are not used again, so that others may go on sharing them)."""
        self._released.append(slot)
        self.idle.append(slot)
        return self.content.pop(slot)

    def step(
        self,
        work: dict[int, int],
        drafts: dict[int, list[int]] | None = None,
        *,
        device: bool = False,
        parents: dict[int, list[int]] | None = None,
        hosted: tuple[int, ...] = (),
        snapshots: list[StateCopy] | None = None,
        masks: Any = None,
    ) -> dict[int, list[int]]:
        """Compute work[slot] known tokens of each slot, then its drafts; the tokens gained per slot. With
        `device` the drafts are the executor's own, but for the slots `hosted`, and `drafts` says how many.
        `parents`: of a slot's drafts, where they are a tree."""
        drafts = drafts or {}
        own = {s: drafts.get(s, []) for s in work}
        slots, counts = list(work), [work[s] + len(own[s]) for s in work]
        for slot, count in zip(slots, counts, strict=True):
            self._reserve(slot, self.computed[slot] + count)
        plan = ExecutorPlan(
            self.steps,
            i32(slots),
            i32([self.computed[s] for s in slots]),
            i32(counts),
            i32([len(own[s]) for s in slots]),
            i32([int(self.computed[s] + work[s] == len(self.content[s])) for s in slots]),
            new=self._new,
            released=i32(self._released),
            tables=[_table(u) for u in self._updates],
            restores=self._restores,
            snapshots=snapshots or [],
            draft_tokens=i32([t for s in slots if not device or s in hosted for t in own[s]]),
            device_drafts=device,
            hosted=i32([len(own[s]) * (s in hosted) for s in slots] if hosted else None),
            parents=i32(
                [p for s in slots for p in parents.get(s, range(-1, len(own[s]) - 1))] if parents else None
            ),
        )
        self._new, self._released, self._restores = [], [], []
        self._updates = [[] for _ in self.groups]
        self.steps += 1
        handle = self.executor.forward(plan)
        result = self.executor.sample(handle, masks).result()
        return self._commit(plan, handle.logits.double().numpy(), result)

    def generate(self, slot: int, count: int) -> list[int]:
        """Decode `count` further tokens of one slot, prefill included."""
        out: list[int] = []
        while len(out) < count:
            out += self.step({slot: len(self.content[slot]) - self.computed[slot]})[slot]
        return out

    def _commit(self, plan: ExecutorPlan, logits: Any, result: Any) -> dict[int, list[int]]:
        gained: dict[int, list[int]] = {}
        self.logprobs = {int(plan.slots[i]): p for i, p in (result.logprobs or {}).items()}
        self.prompt_logprobs = {int(plan.slots[i]): p for i, p in (result.prompt_logprobs or {}).items()}
        self.logits, at, row = {}, 0, 0
        for i, slot in enumerate(plan.slots.tolist()):
            n, drafts = int(result.accepted[i]), int(plan.drafts[i])
            gained[slot] = result.tokens[at : at + n].tolist()
            at += n
            if plan.samples[i]:
                self.logits[slot] = logits[row : row + 1 + drafts]
                row += 1 + drafts
            self.content[slot] += gained[slot]
            self.drafted, self.taken = self.drafted + drafts, self.taken + max(0, n - 1)
            self.computed[slot] += int(plan.counts[i]) - drafts + max(0, n - 1)
            self.proposed[slot] = 0 if result.proposed is None else int(result.proposed[i])
        self.result = result
        assert row == len(logits) and at == len(result.tokens)
        return gained

    def _reserve(self, slot: int, tokens: int) -> None:
        for g, group in enumerate(self.groups):
            while group.paged and len(self.tables[slot][g]) * group.block_tokens < tokens:
                self._append(slot, g, self.free[g].pop())

    def _append(self, slot: int, group: int, block: int) -> None:
        self._updates[group].append((slot, len(self.tables[slot][group]), block))
        self.tables[slot][group].append(block)


def _table(updates: list[tuple[int, int, int]]) -> TableUpdate:
    columns = zip(*updates, strict=True) if updates else [(), (), ()]
    return TableUpdate(*(i32(list(c)) for c in columns))
