"""`Slots`: what an executor remembers per sequence between steps, so that plans carry differences only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bien.core.errors import PluginFault
from bien.core.kv.groups import KVGroup
from bien.core.plan import I32, ExecutorPlan, NewSequence
from bien.core.request import Prompt, TokenIds
from bien.core.sampling.adjust import Adjustment


class Slots:
    """Arrays over slots. Written by `apply` (from plans) and `extend` (from results)."""

    def __init__(self, groups: tuple[KVGroup, ...], slots: int, capacity: int) -> None:
        """`capacity`: positions per slot, drafts included."""
        self.tokens: NDArray[np.int64] = np.zeros((slots, capacity), np.int64)  # known tokens, then drafts
        self.lengths: I32 = np.zeros(slots, np.int32)  # known tokens
        self.prompts: I32 = np.zeros(slots, np.int32)  # of them: the original prompt
        self.seeds: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.choices: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots)
        self.top_p = np.ones(slots)
        self.top_k: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots)
        self.adjustments: dict[int, Adjustment] = {}  # of the slots that ask for any
        self.logprobs: dict[int, int] = {}  # of the slots that ask: alternatives per token
        self.prompt_logprobs: dict[int, int] = {}  # the same of the prompt's
        self.max_drafts: I32 = np.zeros(slots, np.int32)
        self.forced: dict[int, NDArray[np.int64]] = {}  # slot -> recorded continuation
        self.tables: tuple[I32, ...] = tuple(
            np.zeros((slots, -(-capacity // g.block_tokens) if g.paged else 1), np.int32) for g in groups
        )
        self._sizes = [g.block_tokens for g in groups]

    def apply(self, plan: ExecutorPlan) -> None:
        """released, new, tables, draft_tokens of a plan."""
        for slot in plan.released.tolist():
            self.forced.pop(slot, None)
            self.adjustments.pop(slot, None)
            self.logprobs.pop(slot, None)
            self.prompt_logprobs.pop(slot, None)
        for new in plan.new:
            self._enter(new)
        for table, update in zip(self.tables, plan.tables, strict=False):
            if len(update.slots):
                table[update.slots, update.index] = update.blocks
        if len(plan.draft_tokens):
            at, given = 0, plan.hosted if plan.device_drafts else plan.drafts
            for slot, drafts in zip(plan.slots.tolist(), given.tolist(), strict=True):
                if drafts:
                    self.draft(slot, plan.draft_tokens[at : at + drafts])
                    at += drafts

    def _enter(self, new: NewSequence) -> None:
        slot, n = new.slot, len(new.tokens)
        if n > self.tokens.shape[1]:
            raise PluginFault(f"slot {slot}: {n} tokens do not fit into {self.tokens.shape[1]} positions")
        self.tokens[slot, :n] = ids(new.tokens)
        self.lengths[slot], self.prompts[slot] = n, new.prompt_tokens
        self.seeds[slot] = np.uint64(new.seed & 0xFFFFFFFFFFFFFFFF)
        self.choices[slot] = new.sampling.choice
        self.temperature[slot] = new.sampling.temperature
        self.top_p[slot], self.top_k[slot] = new.sampling.top_p, new.sampling.top_k
        self.min_p[slot] = new.sampling.min_p
        self.logprobs.pop(slot, None)
        if new.sampling.logprobs >= 0:
            self.logprobs[slot] = new.sampling.logprobs
        self.prompt_logprobs.pop(slot, None)
        if new.sampling.prompt_logprobs >= 0:
            self.prompt_logprobs[slot] = new.sampling.prompt_logprobs
        self.adjustments.pop(slot, None)
        adjustment = Adjustment.of(new.sampling, new.ends)
        if adjustment is not None:
            self.adjustments[slot] = adjustment
        self.max_drafts[slot] = new.max_drafts
        self.forced.pop(slot, None)
        if new.forced is not None:
            self.forced[slot] = ids(new.forced)
        for table in self.tables:
            table[slot] = 0

    def draft(self, slot: int, tokens: I32 | NDArray[np.int64]) -> None:
        """Put drafts behind the known tokens."""
        length = int(self.lengths[slot])
        self.tokens[slot, length : length + len(tokens)] = tokens

    def extend(self, slots: I32, accepted: I32, tokens: I32) -> None:
        """Confirmed tokens of a step: accepted[i] of slots[i], concatenated."""
        begin = self.lengths[slots]
        if bool((accepted == 1).all()):
            self.tokens[slots, begin] = tokens
        else:
            row = np.repeat(slots, accepted)
            first = np.cumsum(accepted) - accepted
            self.tokens[row, np.repeat(begin - first, accepted) + np.arange(len(tokens))] = tokens
        self.lengths[slots] = begin + accepted

    def forced_tokens(self, slots: I32, positions: NDArray[np.int64]) -> I32 | None:
        """Per (slot, position): the recorded token, -1 where there is none. None: no slot has any."""
        if not self.forced:
            return None
        out = np.full(len(slots), -1, np.int32)
        outputs = positions - self.prompts[slots]
        for i, (slot, n) in enumerate(zip(slots.tolist(), outputs.tolist(), strict=True)):
            recorded = self.forced.get(slot)
            if recorded is not None and n < len(recorded):
                out[i] = recorded[n]
        return out

    def room(self, group: int, slot: int) -> int:
        """Positions behind the known tokens that the slot's blocks of a paged group still take."""
        blocks = int(np.count_nonzero(self.tables[group][slot]))
        return blocks * self._sizes[group] - int(self.lengths[slot])


def ids(prompt: Prompt) -> NDArray[np.int64]:
    """The token ids of content. PluginFault for opaque content: torch needs ids."""
    if not isinstance(prompt, TokenIds):
        raise PluginFault("the torch executor needs token ids; opaque block runs only run in a simulation")
    return np.frombuffer(prompt.packed, np.uint32).astype(np.int64)
