"""Sizes in bytes as people write them, read strictly and written back."""

from __future__ import annotations

import re

from bien.core.errors import DeploymentError

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[A-Za-z]+)", re.ASCII)


def parse_size(value: object, path: str) -> int:
    """Bytes of `"2GiB"`, `"1.5 GB"` or a whole number of bytes. DeploymentError at `path` for all else:
    a unit is never guessed, and what is no whole number of bytes is rounded down."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(value)
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None or found["unit"] not in UNITS:
        raise DeploymentError(
            f'{path}: {value!r} is no size; valid: a number and a unit, like "2GiB" or "512MiB" '
            f"({', '.join(UNITS)}), or a whole number of bytes",
            field=path,
        )
    whole, _, part = found["number"].partition(".")
    unit = UNITS[found["unit"]]  # in whole numbers: a float has 53 bits
    return int(whole) * unit + int(part or 0) * unit // int(10 ** len(part))


def megabytes(size: int) -> str:
    """Rounded up: `1,280 MB`."""
    return f"{-(-size // 1_000_000):,} MB"
