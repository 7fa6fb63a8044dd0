"""The two forms of a step: what a scheduler decides, and what an executor is sent.

Plan form: `{sequence: tokens to compute}` plus drafts; there is no prefill/decode flag. The executor's
form carries *differences* per sequence as packed arrays; ranks keep block tables and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bien.core.logprobs import TokenLogprobs
from bien.core.request import Prompt, SamplingParams

if TYPE_CHECKING:
    from bien.core.sequence import Sequence

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


_NONE: I32 = np.empty(0, np.int32)


def i32(values: list[int] | None = None) -> I32:
    """A packed int32 array."""
    return np.asarray(values, dtype=np.int32) if values else _NONE


@dataclass(slots=True)
class PlanItem:
    """Compute `tokens` positions of `sequence`, the last `drafts` of them being draft tokens."""

    sequence: Sequence
    tokens: int
    drafts: int = 0


@dataclass(slots=True)
class StepPlan:
    """A scheduler's decision for one step."""

    items: list[PlanItem] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(slots=True)
class NewSequence:
    """A sequence enters (or re-enters after preemption) an executor slot."""

    slot: int
    tokens: Prompt  # every known token: prompt plus confirmed output
    prompt_tokens: int  # of the original prompt (RNG positions and forced tokens count from there)
    sampling: SamplingParams
    seed: int  # 64 bit, always set
    forced: Prompt | None = None  # recorded continuation, index 0 = first output token
    max_drafts: int = 0  # device drafters: at most so many drafts per round
    ends: tuple[int, ...] = ()  # tokens that end it; not drawn before sampling.min_tokens outputs


@dataclass(slots=True)
class TableUpdate:
    """For one KV group: block_table[slots[i], index[i]] = blocks[i]. A STATE group uses index 0 only."""

    slots: I32
    index: I32
    blocks: I32


@dataclass(slots=True)
class StateCopy:
    """Copy a state block. `position` = number of tokens that the state has absorbed.

    As a restore it happens before the forward (src: snapshot block, dst: live block; src 0 = zero state).
    As a snapshot it happens when this step's confirmed tokens reach `position` (src: live block of
    `slot`, dst: snapshot block); if they do not (rejected drafts), it does not happen.
    """

    group: int
    slot: int
    position: int
    src: int
    dst: int


@dataclass(slots=True)
class ExecutorPlan:
    """One step for the executor. Row arrays all have one entry per planned sequence, in plan order.

    Row i computes positions starts[i] .. starts[i]+counts[i]-1 of slots[i]; the last drafts[i] of them
    hold drafts. samples[i] is 1 when the row reaches the last known token, so that the rows
    counts[i]-1-drafts[i] .. counts[i]-1 yield tokens; else it is a chunk that yields none.
    Order of application: released, new, tables, restores, draft_tokens, forward, sample, snapshots.
    """

    step: int
    slots: I32
    starts: I32
    counts: I32
    drafts: I32
    samples: I32
    new: list[NewSequence] = field(default_factory=list)
    released: I32 = field(default_factory=i32)  # slots that are free now
    tables: list[TableUpdate] = field(default_factory=list)  # one per KV group
    restores: list[StateCopy] = field(default_factory=list)
    snapshots: list[StateCopy] = field(default_factory=list)
    draft_tokens: I32 = field(default_factory=i32)  # host drafts of all rows, concatenated in row order
    device_drafts: bool = False  # drafts are the executor's own proposals, but for those `hosted`
    # With device drafts, of each row: how many of its drafts (all or none) lie in `draft_tokens` instead.
    # Empty: none of any row.
    hosted: I32 = field(default_factory=i32)
    # Of all drafts, the executor's own too, concatenated in row order: the parent's index, counted from the
    # row's first draft; -1: the last known token. Empty: chains.
    parents: I32 = field(default_factory=i32)

    @property
    def rows(self) -> int:
        return len(self.slots)

    @property
    def tokens(self) -> int:
        return sum(self.counts.tolist())  # of a few rows faster than numpy's


@dataclass(slots=True)
class StepResult:
    """What one step yielded, in plan order.

    accepted[i] = tokens gained by row i: 0 for a chunk, else 1 (sampled) + accepted drafts.
    `tokens` holds them concatenated; None in simulation (nothing is materialised).
    proposed[i] = device drafts ready for the next round of row i (0 without a device drafter).
    """

    step: int
    accepted: I32
    tokens: I32 | None
    proposed: I32 | None = None
    seconds: float = 0.0  # forward + sample, by the executor's clock
    logprobs: dict[int, TokenLogprobs] | None = None  # by row, of its accepted tokens, where asked for
    # By row, of the prompt's tokens that its positions predict: the tokens from starts[i] + 1 on.
    prompt_logprobs: dict[int, TokenLogprobs] | None = None
    # Of the proposed device drafts, concatenated in row order, where the drafter reports them: confidences,
    # and parents as in `ExecutorPlan.parents` where they are trees.
    confidence: F32 | None = None
    parents: I32 | None = None
