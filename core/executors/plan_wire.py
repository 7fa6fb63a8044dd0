"""A plan as it goes to ranks: differences per sequence, arrays as packed int32, one message per step.

The message of a step also carries what the step before it yielded: ranks other than 0 do not sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from bien.core.plan import I32, ExecutorPlan, NewSequence, StateCopy, TableUpdate, i32
from bien.core.request import Prompt, SamplingParams


@dataclass(slots=True)
class Verdict:
    """What a step yielded, as in `StepResult`; without it, a step that was not sampled."""

    accepted: I32
    tokens: I32


class Entry(msgspec.Struct, array_like=True, gc=False):
    """`NewSequence`."""

    slot: int
    tokens: Prompt
    prompt_tokens: int
    sampling: SamplingParams
    seed: int
    forced: Prompt | None = None
    max_drafts: int = 0
    ends: tuple[int, ...] = ()


class StepMessage(msgspec.Struct, array_like=True, gc=False, tag="step"):
    """Written by rank 0, once per step, the same to every rank. Matrices are row-major int32-LE."""

    step: int
    rows: bytes  # [5, S]: slots, starts, counts, drafts, samples
    new: tuple[Entry, ...] = ()
    released: bytes = b""
    tables: tuple[bytes, ...] = ()  # per KV group [3, n]: slots, index, blocks
    restores: bytes = b""  # [5, n]: group, slot, position, src, dst
    snapshots: bytes = b""  # the same
    draft_tokens: bytes = b""
    device_drafts: bool = False
    accepted: bytes | None = None  # of the step before; None: it was not sampled, or is told in a `Settle`
    gained: bytes = b""  # its tokens
    hosted: bytes = b""
    parents: bytes = b""


def encode(plan: ExecutorPlan, before: Verdict | None = None) -> StepMessage:
    return StepMessage(
        plan.step,
        _pack(plan.slots, plan.starts, plan.counts, plan.drafts, plan.samples),
        tuple(_entry(new) for new in plan.new),
        _pack(plan.released),
        tuple(_pack(t.slots, t.index, t.blocks) for t in plan.tables),
        _copies(plan.restores),
        _copies(plan.snapshots),
        _pack(plan.draft_tokens),
        plan.device_drafts,
        *pack_verdict(before),
        _pack(plan.hosted),
        _pack(plan.parents),
    )


def decode(message: StepMessage) -> tuple[ExecutorPlan, Verdict | None]:
    """Arrays are views of the message: read-only."""
    slots, starts, counts, drafts, samples = _unpack(message.rows, 5)
    plan = ExecutorPlan(
        message.step,
        slots,
        starts,
        counts,
        drafts,
        samples,
        [_sequence(entry) for entry in message.new],
        _array(message.released),
        [TableUpdate(*_unpack(packed, 3)) for packed in message.tables],
        _state_copies(message.restores),
        _state_copies(message.snapshots),
        _array(message.draft_tokens),
        message.device_drafts,
        _array(message.hosted),
        _array(message.parents),
    )
    return plan, unpack_verdict(message.accepted, message.gained)


def pack_verdict(verdict: Verdict | None) -> tuple[bytes | None, bytes]:
    """`accepted` and `gained` of a message."""
    return (None, b"") if verdict is None else (_pack(verdict.accepted), _pack(verdict.tokens))


def unpack_verdict(accepted: bytes | None, gained: bytes) -> Verdict | None:
    return None if accepted is None else Verdict(_array(accepted), _array(gained))


def _entry(new: NewSequence) -> Entry:
    return Entry(
        new.slot,
        new.tokens,
        new.prompt_tokens,
        new.sampling,
        new.seed,
        new.forced,
        new.max_drafts,
        new.ends,
    )


def _sequence(entry: Entry) -> NewSequence:
    return NewSequence(
        entry.slot,
        entry.tokens,
        entry.prompt_tokens,
        entry.sampling,
        entry.seed,
        entry.forced,
        entry.max_drafts,
        entry.ends,
    )


def _copies(copies: Iterable[StateCopy]) -> bytes:
    rows = [(c.group, c.slot, c.position, c.src, c.dst) for c in copies]
    return np.asarray(rows, np.int32).tobytes()


def _state_copies(packed: bytes) -> list[StateCopy]:
    return [StateCopy(*row) for row in _array(packed).reshape(-1, 5).tolist()]


def _pack(*arrays: I32) -> bytes:
    return b"".join(a.astype(np.int32, copy=False).tobytes() for a in arrays)


def _array(packed: bytes) -> I32:
    return np.frombuffer(packed, np.int32) if packed else i32()


def _unpack(packed: bytes, count: int) -> list[I32]:
    return list(_array(packed).reshape(count, -1))
