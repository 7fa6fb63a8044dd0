"""The shared library, compiled once per machine, compiler and version of the sources."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from bien.core.api import ResourceError, UserError, cache_folder

FLAGS = (
    "-O3",
    "-std=c++17",
    "-march=native",
    "-ffp-contract=off",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
)
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")
SECONDS = 300  # that the compiler gets for one file
_SHOWN = 2000  # characters of its complaints


def library() -> Path:
    """The library's file; compiled if it is not there. Several processes may ask at once.

    UserError where the processor lacks what the kernels need, or the sources do not compile; ResourceError
    without a compiler or room in the cache folder.
    """
    lacking = [flag for flag in NEEDED if flag not in processor_flags()]
    if lacking:
        raise UserError(
            f"kernels 'native' need a processor with {', '.join(NEEDED)}; this one lacks "
            f'{", ".join(lacking)}; valid here: kernels = "torch"',
            field="kernels",
        )
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise ResourceError(
            f"kernels 'native' are compiled at first use, and there is no compiler {compiler!r}; install "
            'g++, set CXX, or select kernels = "torch"'
        )
    home = cache_folder() / "kernels"
    final = home / f"native-{_key(compiler)}.so"
    if not final.is_file():
        try:
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home) as folder:
                made = _compile(compiler, Path(folder))
                os.replace(made, final)  # whoever comes second replaces equal by equal
        except OSError as error:
            raise ResourceError(
                f"the kernels cannot be written to {home}: {error.strerror or error}; free some space, or "
                "set BIEN_CACHE to another folder"
            ) from error
    return final


def sources() -> list[Path]:
    """The C++ files, headers among them."""
    folder = Path(__file__).parent
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")])


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


def _key(compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sources():
        digest.update(path.read_bytes())
    version = _run([compiler, "--version"]).stdout
    # -march=native: another processor may lack instructions that this one has.
    about = (FLAGS, compiler, version, platform.machine(), sorted(processor_flags()))
    digest.update(repr(about).encode())
    return digest.hexdigest()


def _compile(compiler: str, folder: Path) -> Path:
    made = folder / "native.so"
    files = [str(path) for path in sources() if path.suffix == ".cpp"]
    objects = []
    for file in files:
        objects.append(str(folder / f"{Path(file).stem}.o"))
        _checked([compiler, *FLAGS, "-c", file, "-o", objects[-1]])
    # Not linked with an OpenMP library: torch has loaded one, and two pools of threads would fight.
    _checked([compiler, "-shared", *objects, "-o", str(made)])
    return made


def _checked(command: list[str]) -> None:
    done = _run(command)
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode:
        raise UserError(
            f"kernels 'native' do not compile with {command[0]}; select kernels = \"torch\", or another "
            f"compiler by CXX. It says: {done.stderr.strip()[:_SHOWN]}",
            field="kernels",
        )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    plain = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, env=plain
        )
    except OSError as error:
        raise ResourceError(
            f"the compiler {command[0]!r} cannot be run: {error.strerror}; install g++, set CXX, or select "
            'kernels = "torch"'
        ) from error
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{command[0]} did not end within {SECONDS} seconds: {' '.join(command)}"
        ) from None
