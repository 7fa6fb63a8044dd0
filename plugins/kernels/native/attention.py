"""What the C function of paged attention is told of a step, once for all layers of a group."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bien.core.api import GroupRows

LONG_ROW = 16  # rows that compute at least so many tokens are taken in tiles


class Step(ctypes.Structure):
    """Mirrors `Step` in attention.hpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("table", "starts", "counts", "offsets", "rows", "firsts", "places")
        ),
        *((name, ctypes.c_int64) for name in ("tasks", "blocks", "block_tokens", "queries")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "share", "d", "window")),
        ("longs", ctypes.c_void_p),
        ("long_rows", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


@dataclass(slots=True)
class AttentionPlan:
    """Which sequences of a step are taken in pieces of their keys, and which in tiles."""

    step: Step
    address: int
    short: bool  # whether there is any of the one kind
    long: bool  # and of the other
    held: tuple[Any, ...]  # the arrays that `step` points to

    @classmethod
    def of(cls, rows: GroupRows, piece: int, kv_heads: int, share: int, d: int) -> AttentionPlan:
        counts = rows.counts
        short = np.flatnonzero(counts < LONG_ROW)
        ends = (rows.starts + counts)[short].astype(np.int64)
        window = rows.window
        begins = (
            np.maximum(rows.starts[short].astype(np.int64) - window + 1, 0) // piece if window else 0 * ends
        )
        pieces = -(-ends // piece) - begins
        task = np.repeat(np.arange(len(short)), pieces)
        number = np.arange(len(task)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        sequence = short[task].astype(np.int32)
        firsts = ((begins[task] + number) * piece).astype(np.int32)
        queries = counts[sequence].astype(np.int64) * (share * kv_heads)
        ends = np.cumsum(queries)
        table = np.ascontiguousarray(rows.table, np.int32)
        longs = np.flatnonzero(counts >= LONG_ROW).astype(np.int32)
        arrays = (
            table,
            np.ascontiguousarray(rows.starts, np.int32),
            np.ascontiguousarray(counts, np.int32),
            np.ascontiguousarray(rows.offsets, np.int64),
            sequence,
            firsts,
            ends - queries,
        )
        step = Step(
            *(array.ctypes.data for array in arrays),
            len(task),
            table.shape[1],
            rows.block_tokens,
            int(ends[-1]) if len(ends) else 0,
            kv_heads,
            share,
            d,
            window,
            longs.ctypes.data,
            len(longs),
            0.0,  # the scale is each layer's own
        )
        return cls(step, ctypes.addressof(step), bool(len(task)), bool(len(longs)), (*arrays, longs))
