from __future__ import annotations

import random

import msgspec
import pytest

from bien.core.speculation.acceptance import WINDOW, Acceptance
from bien.core.speculation.counts import MAX_POSITIONS, MAX_SOURCES, OTHERS, DraftCounts, SourceCounts


def test_counts_by_position() -> None:
    counts = SourceCounts()
    counts.add(3, 3, 2)
    counts.add(1, 1, 0)
    counts.add(7, 3, 3)  # a tree of depth 3
    assert (counts.rounds, counts.drafted, counts.accepted) == (3, 11, 5)
    assert counts.drafted_at == [3, 2, 2]
    assert counts.accepted_at == [2, 2, 1]
    assert counts.acceptance_length == 1 + 5 / 3
    assert SourceCounts().acceptance_length == 1


def test_sums() -> None:
    rng = random.Random(3)
    parts, whole = [DraftCounts() for _ in range(5)], DraftCounts()
    for _ in range(200):
        drafted = rng.randrange(1, 9)
        row = (rng.choice("abc"), drafted, drafted, rng.randrange(drafted + 1))
        rng.choice(parts).add(*row)
        whole.add(*row)
    out = DraftCounts()
    for part in parts:
        before = msgspec.msgpack.encode(part)
        out.merge(part)
        assert msgspec.msgpack.encode(part) == before
    assert out == whole
    assert out.total.drafted == sum(c.drafted for c in whole.sources.values())
    copied = whole.copy()
    copied.add("a", 1, 1, 1)
    assert out == whole != copied


def test_stays_small() -> None:
    counts = DraftCounts()
    for i in range(100):
        counts.add(f"s{i}", 200, 200, 150)
    assert len(counts.sources) == MAX_SOURCES + 1
    assert counts.sources[OTHERS].rounds == 100 - MAX_SOURCES
    assert len(counts.total.accepted_at) == MAX_POSITIONS
    assert counts.total.accepted == 15_000


def test_acceptance_is_learnt_by_position_and_source() -> None:
    rng, seen = random.Random(5), Acceptance()
    for _ in range(3000):
        accepted = next((i for i, c in enumerate((0.9, 0.5, 0.7)) if rng.random() > c), 3)
        seen.add("a", 3, accepted)
        seen.add("b", 3, 0)
    assert seen.chances("a", 3) == pytest.approx([0.9, 0.5, 0.7], abs=0.1)
    assert seen.chances("b", 1)[0] < 0.02
    assert seen.chances("never seen", 2) == [0.5, 0.5]


def test_positions_not_reached_are_as_good_as_those_before() -> None:
    seen = Acceptance()
    for _ in range(50):
        seen.add("a", 1, 1)
    first, second, third = seen.chances("a", 3)
    assert first == second == third > 0.95


def test_acceptance_of_long_ago_is_forgotten() -> None:
    seen = Acceptance()
    for _ in range(20 * WINDOW):
        seen.add("a", 2, 2)
    for _ in range(4 * WINDOW):
        seen.add("a", 2, 0)
    assert seen.chances("a", 1)[0] < 0.1


def test_acceptance_of_many_sources_stays_small() -> None:
    seen = Acceptance()
    for i in range(100):
        seen.add(f"s{i}", 1, 1)
    assert seen.chances("s99", 1) == seen.chances("s50", 1) != [0.5]
