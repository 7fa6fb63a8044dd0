"""The native kernels' library: compiled once, by whoever comes first, and clear words where it cannot be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bien.core.compose import compose
from bien.core.deployment import parse_deployment
from bien.core.errors import BienError, ResourceError, UserError
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.core.worker.launch import launch
from bien.core.worker.start import assign
from bien.plugins.kernels.native import compile as compiling
from bien.plugins.kernels.native.compile import library
from tests.plugins.test_kernels import native_kernels

# A compiler in the place of g++: it notes what it is asked, and makes an empty file of what it is told to.
RECORDER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ "$1" = --version ] && exec cat "$(dirname "$0")/version"
for last in "$@"; do :; done
echo library > "$last"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BIEN_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "processor_flags", lambda: frozenset(compiling.NEEDED))


def compiler(folder: Path, script: str, version: str = "1.0") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "version").write_text(version)
    path = folder / "cxx"
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder, which has a file `calls` after the first one."""
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "tools", RECORDER)))
    return tmp_path / "tools"


def calls(folder: Path) -> list[str]:
    return [c for c in (folder / "calls").read_text().splitlines() if c != "--version"]


def test_it_is_compiled_once(cache: Path, recorder: Path) -> None:
    made = library()
    assert made.read_text() == "library\n" and made.parent == cache / "kernels"
    assert list(made.parent.iterdir()) == [made], "it leaves something behind"
    commands = calls(recorder)
    assert len(commands) == len([s for s in compiling.sources() if s.suffix == ".cpp"]) + 1
    assert library() == made and calls(recorder) == commands


def test_what_the_library_depends_on_names_it(
    cache: Path, recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {library()}
    (recorder / "version").write_text("1.1")
    made.add(library())
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-g"))
    made.add(library())
    more = frozenset({*compiling.NEEDED, "avx512_bf16"})
    monkeypatch.setattr(compiling, "processor_flags", lambda: more)
    made.add(library())
    copies = []
    for source in compiling.sources():
        copies.append(tmp_path / source.name)
        copies[-1].write_bytes(source.read_bytes())
    monkeypatch.setattr(compiling, "sources", lambda: copies)
    made.add(library())
    assert len(made) == 4, "the same sources elsewhere are the same"
    header = next(c for c in copies if c.suffix == ".hpp")
    header.write_text(header.read_text() + "\n// changed\n")
    made.add(library())
    assert len(made) == 5


@pytest.mark.parametrize("cxx", ["/nonexistent", "no-such-compiler"])
def test_without_a_compiler(cxx: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(ResourceError, match=rf"no compiler '{cxx}'.*kernels = \"torch\""):
        library()
    assert not cache.exists()


def test_a_compiler_that_cannot_be_run(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "tools", "no program")))
    with pytest.raises(ResourceError, match="cxx"):
        library()


def test_a_compiler_that_fails(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'unknown option -fopenmp' >&2; exit 1\n"
    path = compiler(tmp_path / "tools", script)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(UserError, match="unknown option -fopenmp") as caught:
        library()
    assert caught.value.field == "kernels"
    assert str(path) in str(caught.value) and 'kernels = "torch"' in str(caught.value)
    assert list((cache / "kernels").iterdir()) == [], "it leaves something behind"


def test_a_compiler_that_does_not_end(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '#!/bin/sh\n[ "$1" = --version ] && exit 0\nexec sleep 60\n'
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "tools", script)))
    monkeypatch.setattr(compiling, "SECONDS", 0.2)
    with pytest.raises(ResourceError, match="did not end within"):
        library()
    assert list((cache / "kernels").iterdir()) == []


def test_a_full_disk(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As g++ reports it."""
    script = (
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        "echo 'fatal error: error writing to x.s: No space left on device' >&2; exit 1\n"
    )
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "tools", script)))
    with pytest.raises(ResourceError, match=r"No space left.*BIEN_CACHE"):
        library()


def test_a_cache_that_cannot_be_written(
    recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BIEN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ResourceError, match=r"cannot be written to .*file/cache/kernels.*BIEN_CACHE"):
        library()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else(cache: Path, recorder: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(ResourceError, match="Permission denied"):
        library()


def test_a_processor_without_vnni(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = frozenset({"avx2", "avx512f", "avx512bw", "avx512vl"})
    monkeypatch.setattr(compiling, "processor_flags", lambda: few)
    monkeypatch.setenv("CXX", "/nonexistent")  # the processor comes first: no compiler would help
    with pytest.raises(UserError, match=r"lacks avx512_vnni; valid here: kernels = \"torch\"") as caught:
        library()
    assert caught.value.field == "kernels" and not cache.exists()


def test_auto_goes_on_without(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from bien.core.api import TorchKernels
    from bien.core.providers import Context, NoParameters
    from bien.plugins.kernels.native import kernels, make_best

    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setattr(kernels, "native", lambda: library())
    assert type(make_best(NoParameters(), Context())) is TorchKernels
    assert "no compiler" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_auto_takes_the_native_ones_for_what_they_do(dtype: str) -> None:
    from bien.core.api import TorchKernels
    from bien.core.providers import Context, NoParameters
    from bien.plugins.kernels.native import make_best

    native = native_kernels()
    made = make_best(NoParameters(), Context(dtype=dtype))
    assert type(made) is (type(native) if dtype == "float32" else TorchKernels)


def test_a_library_that_is_damaged(tmp_path: Path) -> None:
    from bien.plugins.kernels.native.library import Library

    path = tmp_path / "native.so"
    path.write_text("library")
    with pytest.raises(ResourceError, match="native.so cannot be loaded"):
        Library(str(path))


@pytest.mark.slow
async def test_a_worker_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    native_kernels()  # or skip
    toy = write_toy(tmp_path / "toy")
    pool = {"kernels": "native", "kv_tokens": 512}
    deployment = parse_deployment({"model": {"name": str(toy)}, "pool": [pool]})
    starts = assign(compose(deployment, PluginManager.load("")))
    env = {"CXX": "/nonexistent", "BIEN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    with pytest.raises(BienError, match=r"no compiler '/nonexistent'.*kernels = \"torch\""):
        await launch(starts, env=env)


SLOW_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec g++ --version
touch "$(dirname "$0")/$PPID"
n=0
while [ "$(ls "$(dirname "$0")" | grep -c '^[0-9]')" -lt 2 ] && [ $n -lt 200 ]; do
    n=$((n + 1)); sleep 0.05
done
exec g++ "$@" -O1
"""
USE = """
import torch
from bien.core.api import Context
from bien.plugins.kernels.native import make
kernels = make(None, Context())
x = torch.randn(3, 40)
assert torch.allclose(kernels.silu_mul(x), torch.nn.functional.silu(x[:, :20]) * x[:, 20:], atol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_at_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compile at the same time (the compiler waits for the other), both work, one library is left."""
    monkeypatch.undo()
    native_kernels()  # or skip
    path = compiler(tmp_path / "tools", SLOW_COMPILER)
    env = {**os.environ, "CXX": str(path), "BIEN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command: list[Any] = [sys.executable, "-c", USE]
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        _, said = process.communicate(timeout=380)
        assert process.returncode == 0, said
    assert len([f for f in (tmp_path / "tools").iterdir() if f.name.isdecimal()]) == 2, "one did not compile"
    (made,) = (tmp_path / "cache" / "kernels").iterdir()
    assert made.suffix == ".so"
