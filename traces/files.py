"""Documents of a trace path: a file, a folder, an archive, compressed or not; one in memory at a time."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import zstandard

from bien.core.errors import TraceError


def _open_zstd(path: Path) -> IO[bytes]:
    return cast(
        IO[bytes], zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    )


def _open_plain(path: Path) -> IO[bytes]:
    return path.open("rb")


_OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {
    ".xz": lambda path: cast(IO[bytes], lzma.LZMAFile(path)),  # noqa: SIM115 (the caller closes)
    ".gz": lambda path: cast(IO[bytes], gzip.GzipFile(path)),
    ".bz2": lambda path: cast(IO[bytes], bz2.BZ2File(path)),
    ".zst": _open_zstd,
}
_DAMAGE = (lzma.LZMAError, zlib.error, zstandard.ZstdError, tarfile.TarError, EOFError, OSError)
_SHOWN = 5
_STREAM_NAMES = (".json", ".jsonl")


def open_stream(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed by its last suffix. Close it.

    Raises:
        TraceError: there is no such file, or it cannot be read.
    """
    try:
        return _OPENERS.get(path.suffix.lower(), _open_plain)(path)
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from None


def documents(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each JSON document below `path`: itself, the folder's files in name order, or
    an archive's members in archive order.

    Raises:
        TraceError: naming the file and the position where it is damaged, or that nothing is there.
    """
    if path.is_dir():
        files = document_files(path)
        if not files:
            raise TraceError(f"trace folder {path} holds no .json file (plain or .xz, .gz, .bz2, .zst)")
        for file in files:
            yield from documents(file)
    elif _is_tar(path.name):
        yield from _members(path)
    else:
        yield str(path), _read(path)


def document_files(folder: Path) -> list[Path]:
    """The files below a folder that are documents or archives of them, by name, in the order of reading."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and _is_document(p.name))


def left_out(names: Sequence[str]) -> str:
    """A fidelity note about documents of a folder or archive that its reader has passed over."""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"documents of another format left out: {shown}"


def head(path: Path, size: int = 65536) -> bytes:
    """The first bytes of the first document, for telling formats apart; empty if there is none."""
    if path.is_dir():
        files = document_files(path)
        return head(files[0], size) if files else b""
    try:
        with open_stream(path) as stream:
            if not _is_tar(path.name):
                return stream.read(size)
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    body = archive.extractfile(member) if member.isfile() else None
                    if body is not None and _is_document(member.name):
                        return body.read(size)
    except _DAMAGE:
        return b""
    return b""


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    done = 0
    with open_stream(path) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    body = archive.extractfile(member) if member.isfile() else None
                    if body is None or not _is_document(member.name):
                        continue
                    content = body.read()
                    yield f"{path}:{member.name}", content
                    done += 1
        except _DAMAGE as error:
            raise TraceError(f"trace {path} is damaged after {done} documents: {error}") from None
    if not done:
        raise TraceError(f"trace archive {path} holds no .json file")


def _read(path: Path) -> bytes:
    content = io.BytesIO()
    with open_stream(path) as stream:
        try:
            while chunk := stream.read(1 << 20):
                content.write(chunk)
        except _DAMAGE as error:
            raise TraceError(f"trace {path} is damaged after byte {content.tell()}: {error}") from None
    return content.getvalue()


def _is_tar(name: str) -> bool:
    stem = Path(name)
    return ".tar" in (s.lower() for s in stem.suffixes[-2:]) or stem.suffix.lower() in (".tgz", ".txz")


def _is_document(name: str) -> bool:
    stem = Path(name)
    suffixes = [s.lower() for s in stem.suffixes]
    while suffixes and suffixes[-1] in _OPENERS:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _STREAM_NAMES and not stem.name.startswith(".")
