"""Shared libraries of plugins, compiled once per machine, compiler and version of the sources."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bien.core.cache_folder import cache_folder
from bien.core.errors import ResourceError, UserError

_SHOWN = 2000  # characters of the compiler's complaints


class LibrarySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to compile, and how to speak of it."""

    name: str  # of the file, before its digest
    folder: str  # in the cache folder
    sources: Sequence[Path]  # .cpp files, and the headers that they include
    flags: Sequence[str]
    link: Sequence[str] = ()
    about: str = ""  # what else the result depends on
    seconds: float = 300.0  # that the compiler gets for one file
    what: str  # in messages, followed by "are compiled at first use"
    instead: str  # what to do without it, in messages
    field: str  # of the deployment that chose it


def compile_library(spec: LibrarySpec) -> Path:
    """The library's file; compiled if it is not there, by CXX or g++. Several processes may ask at once.

    UserError where the sources do not compile; ResourceError without a compiler, when it takes too long, or
    without room in the cache folder.
    """
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise ResourceError(
            f"{spec.what} are compiled at first use, and there is no compiler {compiler!r}; install g++, "
            f"set CXX, or {spec.instead}"
        )
    home = cache_folder() / spec.folder
    final = home / f"{spec.name}-{_key(spec, compiler)}.so"
    if not final.is_file():
        try:
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home) as folder:
                made = _compile(spec, compiler, Path(folder))
                os.replace(made, final)  # whoever comes second replaces equal by equal
        except OSError as error:
            raise ResourceError(
                f"{spec.what} cannot be written to {home}: {error.strerror or error}; free some space, or "
                "set BIEN_CACHE to another folder"
            ) from error
    return final


def processor_flags() -> frozenset[str]:
    """What the processor offers, as Linux spells it; nothing on other systems."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _key(spec: LibrarySpec, compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in spec.sources:
        digest.update(path.read_bytes())
    version = _run(spec, [compiler, "--version"]).stdout
    about = (tuple(spec.flags), tuple(spec.link), compiler, version, platform.machine(), spec.about)
    digest.update(repr(about).encode())
    return digest.hexdigest()


def _compile(spec: LibrarySpec, compiler: str, folder: Path) -> Path:
    made = folder / "made.so"
    objects = []
    for path in spec.sources:
        if path.suffix == ".cpp":
            objects.append(str(folder / f"{path.stem}.o"))
            _checked(spec, [compiler, *spec.flags, "-c", str(path), "-o", objects[-1]])
    _checked(spec, [compiler, "-shared", *objects, *spec.link, "-o", str(made)])
    return made


def _checked(spec: LibrarySpec, command: list[str]) -> None:
    done = _run(spec, command)
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode:
        raise UserError(
            f"{spec.what} do not compile with {command[0]}; {spec.instead}, or choose another compiler by "
            f"CXX. It says: {done.stderr.strip()[:_SHOWN]}",
            field=spec.field,
        )


def _run(spec: LibrarySpec, command: list[str]) -> subprocess.CompletedProcess[str]:
    plain = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=spec.seconds, env=plain
        )
    except OSError as error:
        raise ResourceError(
            f"the compiler {command[0]!r} cannot be run: {error.strerror}; install g++, set CXX, or "
            f"{spec.instead}"
        ) from error
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{command[0]} did not end within {spec.seconds:g} seconds: {' '.join(command)}"
        ) from None
