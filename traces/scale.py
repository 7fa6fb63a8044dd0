"""Shrinks a trace by F = 1/2^k and keeps who shares what with whom.

Cumulative rounding: position p becomes round(p * F), so prompts that share n tokens share exactly
round(n * F). The scaled token j stands for the window of 2^k tokens that ends at j * 2^k + 2^(k-1) - 1,
and is named by that window's content:

    tokens   0 . . . . . . . . . . . . . . . . .      k = 2
    windows [--][------][------][------][------]
    scaled    0     1       2       3       4
"""

from __future__ import annotations

import array
import hashlib
import math

from bien.core.errors import UserError
from bien.core.request import BlockRuns
from bien.traces.model import Session, Stream, Turn

SMALLEST = 1 << 16  # the largest 1/F
_RESIDUE_BITS = 46  # ids below 2^46 stay unique: (id mod 2^k) goes above (id >> k)
_MIXED = 1 << 62  # windows over several runs are named by a hash, above all other ids


def scale_exponent(factor: float) -> int:
    """k of F = 1/2^k.

    Raises:
        UserError: no such power, or smaller than 1/65536.
    """
    k = round(-math.log2(factor)) if 0 < factor <= 1 else -1
    if not 0 <= k < SMALLEST.bit_length() or factor != 1 / (1 << k):
        raise UserError(
            f"token scale {factor:g} is no 1/2^k; valid: 1, 1/2, 1/4 … 1/{SMALLEST}", field="token-scale"
        )
    return k


def scaled_length(tokens: int, k: int) -> int:
    """round(tokens / 2^k), half up."""
    return (2 * tokens + (1 << k)) >> (k + 1)


def scale_session(session: Session, k: int) -> Session:
    """A session of its own with all content and counts scaled; times are as they were."""
    if k == 0:
        return session
    streams = [
        Stream(
            s.id, [_scale_turn(t, k) for t in s.turns], s.parent, s.spawned_after, s.joined_before, s.label
        )
        for s in session.streams
    ]
    return Session(session.id, streams, session.tenant, session.scope, session.provenance, session.start)


def _scale_turn(turn: Turn, k: int) -> Turn:
    whole = scale_content(turn.input.join(turn.output), k)
    cut = scaled_length(turn.input_tokens, k)
    derived = scaled_length(turn.input_tokens + turn.derived, k) - cut
    cached = None if turn.cached_tokens is None else scaled_length(turn.cached_tokens, k)
    return Turn(
        whole.slice(0, cut) if cut else _one(turn.input),
        whole.slice(cut, len(whole)) if len(whole) > cut else _one(turn.output),
        turn.gap,
        turn.gap_kind,
        turn.tool,
        cached,
        turn.ttft,
        turn.duration,
        turn.stop,
        derived,
        turn.joins,
    )


def scale_content(content: BlockRuns, k: int) -> BlockRuns:
    """Content of round(length / 2^k) tokens; two results share round(n / 2^k) tokens where the contents
    share n."""
    if k == 0:
        return content
    size = 1 << k
    half = (size >> 1) - 1
    out: list[tuple[int, int]] = []
    pieces: list[int] = []  # start, length of what the open window has of earlier runs
    at = 0
    for start, n in content.runs():
        first = -((half - at) // size)  # scaled tokens whose window ends inside this run: first .. stop-1
        stop = -((half - at - n) // size)
        first, stop = max(first, 0), max(stop, 0)
        if first == stop:
            pieces += (start, n)
            at += n
            continue
        end = first * size + half  # position of the window's last token
        if pieces:
            out.append((_mixed([*pieces, start, end - at + 1]), 1))
            first, end = first + 1, end + size
        if first < stop:
            last = start + end - at
            out.append(((last & (size - 1)) << _RESIDUE_BITS | last >> k, stop - first))
        after = (stop - 1) * size + half + 1
        pieces = [start + after - at, at + n - after] if after < at + n else []
        at += n
    return BlockRuns.of(out)


def _one(content: BlockRuns) -> BlockRuns:
    """One token for what rounds to none."""
    flat = [x for run in content.runs() for x in run]
    return BlockRuns.of([(_mixed([*flat, 0, 0]), 1)])


def _mixed(pieces: list[int]) -> int:
    digest = hashlib.blake2b(array.array("q", pieces).tobytes(), digest_size=8).digest()
    return _MIXED | (int.from_bytes(digest, "little") >> 3)
