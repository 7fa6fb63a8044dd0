"""What a calibration learns from: steps, and requests that are made of steps, with the seconds they took."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from bien.core.errors import UserError

HANGS = 3600.0  # seconds that no step takes


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What one step computed: counts[i] tokens of a sequence from position starts[i] on."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: int  # sequences that gained a token

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def context(self) -> int:
        """Positions that its sequences hold after it, all together."""
        return sum(self.starts) + self.tokens

    @property
    def looked_at(self) -> float:
        """Pairs of a computed token and a position that it sees."""
        starts, counts = np.array(self.starts, dtype=float), np.array(self.counts, dtype=float)
        return float((counts * (starts + (counts + 1) / 2)).sum())


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """A line of a step log."""

    ended: float  # seconds of the engine's clock
    seconds: float
    step: Step


class Observed(msgspec.Struct, frozen=True):
    """`seconds` of these steps one after the other, and of the way of `requests` requests with
    `prompt_tokens` to the engine and back. Equal `place`: repeats of each other."""

    seconds: float
    steps: tuple[Step, ...]
    place: str
    requests: int = 0
    prompt_tokens: int = 0
    repeats: int = 1  # measurements of which `seconds` is the mean


def read_steps(path: Path) -> list[StepRecord]:
    """A step log. UserError names the line that is none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"step log {path}: {error.strerror or error}") from None
    out = []
    for number, line in enumerate(lines, 1):
        try:
            record = msgspec.json.decode(line, type=StepRecord)
        except msgspec.DecodeError as error:
            if number == len(lines):  # its writer was cut off
                break
            raise UserError(f"step log {path}, line {number}: {error}") from None
        step = record.step
        counted = len(step.starts) == len(step.counts) > 0 and min(step.counts) > 0 and min(step.starts) >= 0
        if not counted or not 0 < record.seconds < HANGS:
            raise UserError(
                f"step log {path}, line {number}: {len(step.starts)} starts, {len(step.counts)} counts, "
                f"{record.seconds:g} s; valid: as many of both, one or more, each of a token or more, above "
                f"0 and below {HANGS:g} s"
            )
        out.append(record)
    return out


def by_place(records: Iterable[StepRecord]) -> list[Observed]:
    """Steps alike are one place: as many sequences and tokens, about as much context (a quarter octave).
    Its seconds are the mean of their repeats, those beyond three times the median left out (a machine that
    does other things now and then would have its say in few places, and that by chance)."""
    places: dict[str, list[StepRecord]] = {}
    for record in records:
        places.setdefault(place(record.step), []).append(record)
    out = []
    for key, found in places.items():
        seconds = np.array([r.seconds for r in found])
        usual = seconds <= 3 * np.median(seconds)
        kept = [r for r, keep in zip(found, usual, strict=True) if keep]
        mean = float(seconds[usual].mean())
        # The one whose context is the middle of them stands for all.
        kept.sort(key=lambda r: r.step.looked_at)
        middle = kept[len(kept) // 2].step
        out.append(Observed(mean, (middle,), key, repeats=len(kept)))
    return out


def place(step: Step) -> str:
    """Sequences, about how many tokens, sequences that gain one, quarter octaves of positions."""
    tokens = step.tokens if step.tokens <= 16 else 16 * 2 ** (round(4 * np.log2(step.tokens / 16)) / 4)
    seen = round(4 * np.log2(1 + step.looked_at / step.tokens))
    return f"{step.rows}/{int(tokens)}/{step.samples}/{seen}"
