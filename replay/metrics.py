"""The figures of a run, each by one formula. Times of records are in seconds, figures in the unit named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.replay.record import TurnRecord


class Distribution(msgspec.Struct, frozen=True):
    """All null without a sample."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, samples: Iterable[float | None], scale: float = 1.0) -> Distribution:
        """Of the samples that are not None, times `scale`; percentiles interpolate linearly."""
        return cls.of_array(np.asarray([s for s in samples if s is not None], np.float64) * scale)

    @classmethod
    def of_array(cls, values: NDArray[np.float64]) -> Distribution:
        """Of all values of an array."""
        if not len(values):
            return cls()
        return cls(float(values.mean()), *(float(v) for v in np.percentile(values, (50, 90, 95, 99))))


class Throughput(msgspec.Struct, frozen=True):
    """Tokens per second: `logical` counts all input, `computed` leaves cached input out (null where the
    server does not say what was cached), `output` output only."""

    logical: float | None = None
    computed: float | None = None
    output: float | None = None

    @classmethod
    def of(cls, records: Iterable[TurnRecord], seconds: float, per: int = 1) -> Throughput:
        """Of turns that ended well, per accelerator of `per`."""
        logical = cached = output = 0
        known = True
        for record in records:
            if record.ok:
                logical += record.prompt_tokens + record.got
                cached += record.cached
                output += record.got
                known &= record.cached >= 0
        if seconds <= 0:
            return cls()
        unit = seconds * per
        return cls(logical / unit, (logical - cached) / unit if known else None, output / unit)


def ttft_ms(records: Sequence[TurnRecord]) -> Distribution:
    """Send to first chunk with content."""
    return Distribution.of((r.ttft for r in records), 1e3)


def tpot_ms(records: Sequence[TurnRecord]) -> Distribution:
    """(last - first) / (tokens - those of the first chunk), per request."""
    return Distribution.of((r.tpot for r in records), 1e3)


def e2e_ms(records: Sequence[TurnRecord]) -> Distribution:
    """Send to last chunk with content."""
    return Distribution.of((r.e2e for r in records), 1e3)


def interactivity(records: Sequence[TurnRecord]) -> Distribution:
    """Tokens per second of a request, 1/TPOT: percentiles of the ratio, not ratios of percentiles."""
    return Distribution.of(1 / t for r in records if (t := r.tpot))


def itl_ms(records: Sequence[TurnRecord]) -> Distribution:
    """Gaps between chunks, each spread evenly over the chunk's tokens and counted once per token."""
    # All records end to end: what lies between two of them counts for no token.
    times = np.frombuffer(b"".join(r.chunk_times.tobytes() for r in records), np.float64)
    counts = np.frombuffer(b"".join(r.chunk_counts.tobytes() for r in records), np.uint32).astype(np.int64)
    sizes = np.array([len(r.chunk_counts) for r in records], np.int64)
    counts[(np.cumsum(sizes) - sizes)[sizes > 0]] = 0
    gaps = np.diff(times, prepend=0.0) / np.maximum(counts, 1)
    return Distribution.of_array(np.repeat(gaps * 1e3, counts))


def parity(records: Sequence[TurnRecord]) -> float | None:
    """Cached tokens that the router predicted over those that there were; 1 when both are 0."""
    known = [r for r in records if r.predicted >= 0 and r.cached >= 0]
    if not known:
        return None
    predicted, actual = sum(r.predicted for r in known), sum(r.cached for r in known)
    return 1.0 if predicted == actual else predicted / max(1, actual)


def acceptance_length(records: Sequence[TurnRecord]) -> float | None:
    """Tokens gained per round of drafting and verifying."""
    rounds = sum(r.rounds for r in records if r.rounds > 0)
    accepted = sum(r.accepted for r in records if r.rounds > 0)
    return (accepted + rounds) / rounds if rounds else None
