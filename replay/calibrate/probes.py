"""Probes: sessions that make an engine take steps of all sizes, a few of each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from bien.core.errors import UserError
from bien.core.request import BlockRuns
from bien.traces.model import Session, Stream, Turn

ANSWER = 12  # tokens: decode steps of a batch before its first sequence ends
TURNS = 3
SHORTEST = 32  # tokens of a first prompt
APART = 1 << 24  # virtual ids between sessions
EACH = 8  # up to so many sessions, every number of them is a batch
SHORT = 2  # lengths of prompts for numbers that are no power of two


class Batch(msgspec.Struct, frozen=True):
    """So many sessions at a time, whose first prompts have about so many tokens."""

    sessions: int
    prompt: int


class Reach(msgspec.Struct, frozen=True):
    """What probes may ask of an engine."""

    sessions: int  # at a time
    context: int  # tokens of one session
    cache: int  # tokens of all sessions of a batch
    tokens: int  # prompt tokens of all batches together, about


def batches(reach: Reach, *, every: bool = True) -> list[Batch]:
    """Every number of sessions up to eight, then steps of half an octave (kernels have their own ideas of
    which numbers are alike); prompts four times as long each time, short ones only for what is no power of
    two. Where they ask for more than `reach.tokens`, the dearest are left out. `every` False: powers of
    two only. UserError: the engine holds too little for any."""
    longest = _longest_prompt(min(reach.context, reach.cache))
    if longest < SHORTEST:
        raise UserError(
            f"an engine with room for {max(0, reach.context)} tokens of a session and {reach.cache} of all "
            f"is too small to calibrate; valid: {_tokens(SHORTEST)} tokens or more"
        )
    octaves = [2**i for i in range(int(math.log2(reach.sessions)) + 1)]
    between = [*range(3, EACH), *(3 * n // 2 for n in octaves if n >= EACH)] if every else []
    rows = sorted({*octaves, *(n for n in between if n < reach.sessions), reach.sessions})
    lengths = [SHORTEST]
    while lengths[-1] < longest:
        lengths.append(min(longest, 4 * lengths[-1]))
    found = [
        Batch(n, c)
        for n in rows
        for c in (lengths if n in octaves or n == reach.sessions else lengths[:SHORT])
        if n * _tokens(c) <= reach.cache
    ]
    # Each size costs; of what exceeds the budget the dearest goes, but one of each extreme stays.
    while sum(_cost(b) for b in found) > reach.tokens:
        spare = [b for b in found if b.sessions > 1 and b.prompt > SHORTEST]
        if not spare:
            break
        found.remove(max(spare, key=_cost))
    return found


def sessions(batch: Batch, seed: int) -> Iterator[Session]:
    """Sessions of three turns: a prompt of which all sessions of the batch share the first third, as agents
    share tools and instructions (what is read twice in a step is read from nearer memory), then more on top
    of it (a short addition over a long context, as agents' tool results are)."""
    scope = f"probe-{seed}-{batch.sessions}x{batch.prompt}"
    common = batch.prompt // 3
    for i in range(batch.sessions):
        # Lengths differ, so that sequences start and end one after the other and steps mix.
        first = max(1, round(batch.prompt * (0.6 + 0.4 * ((0.618 * (i + seed)) % 1)))) if i else batch.prompt
        own = common + (i + 1) * APART
        turns, at = [], first
        for n in range(TURNS):
            answer = ANSWER + i % 5
            prompt = BlockRuns.of([(0, common), (own, at - common)])
            turns.append(Turn(input=prompt, output=BlockRuns.of([(own + at - common, answer)])))
            at += answer + max(4, (SHORTEST, batch.prompt // 4)[n % 2])
        yield Session(f"{scope}-{i}", [Stream(0, turns)], scope=scope)


def _tokens(prompt: int) -> int:
    """Of the last turn of the longest session of a batch."""
    return prompt + TURNS * (ANSWER + 4) + max(4, SHORTEST) + max(4, prompt // 4)


def _longest_prompt(room: int) -> int:
    fixed = _tokens(0) - 4
    return max(0, (room - fixed) * 4 // 5)


def _cost(batch: Batch) -> int:
    return batch.sessions * (batch.prompt + TURNS * ANSWER)
