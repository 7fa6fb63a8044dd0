"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.errors import DeploymentError
from bien.core.sizes import UNITS, megabytes, parse_size


@given(st.integers(0, 10**18), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_number_and_a_unit(number: int, unit: str, between: str) -> None:
    assert parse_size(f"{number}{between}{unit}", "x") == number * UNITS[unit]
    assert parse_size(number, "x") == number


@pytest.mark.parametrize(
    ("text", "size"), [("1.5GiB", 3 << 29), ("0.1GB", 100_000_000), ("0.3B", 0), ("2.001kB", 2001)]
)
def test_fractions(text: str, size: int) -> None:
    assert parse_size(text, "x") == size


@pytest.mark.parametrize(
    "value",
    ["", "2", "2G", "2gib", "GiB", "-1GiB", "1e3MB", "1.GiB", ".5GiB", "1,5GiB", "2  GiB", "2GiB ", "٢GiB"]
    + [-1, 2.0, True, None, ["2GiB"], "2GiB\n"],
)
def test_nothing_is_guessed(value: object) -> None:
    with pytest.raises(DeploymentError, match=r"pool\[0\]\.kv_memory: .* is no size; valid: .*GiB") as caught:
        parse_size(value, "pool[0].kv_memory")
    assert caught.value.field == "pool[0].kv_memory"


def test_megabytes_are_rounded_up() -> None:
    assert (megabytes(0), megabytes(1), megabytes(1_234_000_001)) == ("0 MB", "1 MB", "1,235 MB")
