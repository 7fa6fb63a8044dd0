"""Files of results: there whole, or as they were before; links and devices are written through."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from bien.core.errors import ResourceError, UserError


def write_whole(path: Path, data: bytes, what: str) -> None:
    """Write it whole or not at all; `what` names it in the error. A link or device is not replaced by a file
    (as root that would be the end of /dev/null), what it stands for is written to.

    Raises:
        ResourceError: the folder cannot be written to.
    """
    plain = not path.is_symlink() and (path.is_file() or not path.exists())
    part = part_of(path) if plain else path
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            if plain:
                os.fsync(file.fileno())
        if plain:
            os.replace(part, path)
    except OSError as error:
        if plain:
            part.unlink(missing_ok=True)
        raise ResourceError(f"cannot write {what} {path}: {error.strerror or error}") from None


def spare(path: Path, read: Iterable[Path], what: str) -> None:
    """UserError when `path`, where `what` is to be written, is one of the files that it is made from."""
    for file in read:
        if path == file or (path.exists() and file.exists() and path.samefile(file)):
            raise UserError(f"{path} is read to make the {what}; valid: another place for it")


def pretty(value: Any) -> bytes:
    """JSON, indented; equal values give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2) + b"\n"


def part_of(path: Path) -> Path:
    """Where it is written until it is whole."""
    return path.parent / f".{path.name}.{os.getpid()}.part"
