from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.sampling.rng import Purpose, philox4x32, uniforms

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of the authors' Random123 library
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = [np.array([w], np.uint64) for w in counter + key]
    out = philox4x32((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert [int(w[0]) for w in out] == expected


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=20), st.randoms())
def test_a_number_depends_on_its_key_only(keys: list[tuple[int, int]], random: object) -> None:
    together = uniforms([s for s, _ in keys], [p for _, p in keys])
    alone = [float(uniforms([s], [p])[0]) for s, p in reversed(keys)][::-1]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_every_part_of_the_key_counts() -> None:
    base = {"seeds": [5], "positions": [7]}
    numbers = {
        float(uniforms(**{**base, **change})[0])  # type: ignore[arg-type]
        for change in (
            {},
            {"seeds": [6]},
            {"seeds": [5 + 2**32]},
            {"seeds": [5 - 2**63]},
            {"positions": [8]},
            {"positions": [7 + 2**32]},
            {"choice": 1},
            {"purpose": Purpose.DRAFT},
            {"purpose": Purpose.ACCEPT},
        )
    }
    assert len(numbers) == 9


def test_signed_and_unsigned_seeds_are_the_same_bits() -> None:
    assert uniforms(np.array([2**64 - 3], np.uint64), [1])[0] == uniforms(np.array([-3]), [1])[0]


def test_numbers_are_uniform_and_positions_uncorrelated() -> None:
    u = uniforms(np.full(40_000, 11), np.arange(40_000))
    counts = np.histogram(u, 20, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
