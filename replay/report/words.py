"""Texts of the page: names that any trace may have given, times on axes, counted things."""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_left
from itertools import accumulate

NAME = 25  # columns


def clean(text: str) -> str:
    """What XML cannot hold, or moves a terminal's cursor, is replaced."""
    return "".join(
        c if c == "\n" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def plain(text: str) -> str:
    """A name for an axis: clean and not too long."""
    text = clean(text.replace("\n", " "))
    ends = list(accumulate(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text))
    return text if not ends or ends[-1] <= NAME else text[: bisect_left(ends, NAME)] + "…"


def counted(count: int, noun: str) -> str:
    """1 turn, 2 turns."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def clock_text(seconds: float, whole: float, step: float) -> str:
    """A time of a run that lasts `whole` seconds, so exact that times `step` apart read differently."""
    if whole < 300:
        digits = min(6, max(0, math.ceil(-math.log10(step / 4)))) if step > 0 else 1
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if whole < 3600:
        return f"{minutes}:{rest:02} min"
    text = f"{minutes // 60}:{minutes % 60:02}"
    return f"{text} h" if step >= 120 else f"{text}:{rest:02} h"
