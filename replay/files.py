"""Files of results: there whole, or as they were before; links and devices are written through."""

from __future__ import annotations

import errno
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
    plain = _plain(path)
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
        if same_file(path, file):
            raise UserError(f"{path} is read to make the {what}; valid: another place for it")


def same_file(a: Path, b: Path) -> bool:
    """Whether both names are of one file, which need not be there yet."""
    try:
        return a == b or a.samefile(b)
    except OSError:
        return os.path.realpath(a) == os.path.realpath(b)


def kept(path: Path) -> bool:
    """Whether what is written there can be read again: not so with a device or a pipe."""
    return path.is_file() or not os.path.exists(path)


def check_folder(path: Path, what: str = "result") -> None:
    """ResourceError now, not after a long run, when `path` cannot be written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if os.path.exists(path) and not _plain(path):  # written through
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        part = part_of(path.resolve() if path.is_symlink() else path)
        part.write_bytes(b"")
        part.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(
            f"cannot write {what} {path}: {reason}; valid: a file in a folder that can be written"
        ) from None


class _Named(msgspec.Struct):
    schema: Any = None


def check_schema(data: bytes, schema: str, path: Path) -> None:
    """UserError when the JSON names another schema than `schema`: its fields need not be looked at."""
    found = msgspec.json.decode(data, type=_Named).schema
    if found is not None and found != schema:
        raise UserError(f"{path} has schema {found!r}; valid: {schema!r}")


def pretty(value: Any) -> bytes:
    """JSON, indented; equal values give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2) + b"\n"


def _plain(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or not path.exists())


def part_of(path: Path) -> Path:
    """Where it is written until it is whole."""
    return path.parent / f".{path.name}.{os.getpid()}.part"
