"""What is declared, and what lands in sdist and wheel.

Hatchling skips files silently when it has met them under another path, so the archives are built from a
checkout with an editable install's links in place, and compared with what is tracked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOMS = ("core", "plugins", "gateway", "traces", "replay")
OPTIONAL = {"transformers", "matplotlib", "pytest", "hypothesis", "hatchling", "openai", "zmq"}


def requirement_names(root: Path) -> set[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return {re.split(r"[^\w.-]", r)[0].lower().replace("_", "-") for r in project["dependencies"]}


def test_imported_packages_are_declared(sources, root):
    names = requirement_names(root)
    owners = metadata.packages_distributions()
    missing = set()
    for source in sources:
        for name, line in source.imports():
            top = name.split(".")[0]
            if top == "bien" or top in sys.stdlib_module_names or top in OPTIONAL:
                continue
            dists = {d.lower().replace("_", "-") for d in owners.get(top, [top])}
            if not dists & names:
                missing.add(f"{source.where}:{line} imports {top} (of {', '.join(dists)})")
    assert missing == set()


def test_optional_packages_are_not_needed_at_import(sources):
    """Extras are imported inside functions, or in benchmarks."""
    wrong = [
        f"{s.where}:{node.lineno}"
        for s in sources
        if not s.where.startswith("replay/bench/")
        for node in s.tree.body
        if type(node).__name__ in ("Import", "ImportFrom")
        for name in [getattr(node, "module", None) or node.names[0].name]
        if name.split(".")[0] in OPTIONAL
    ]
    assert wrong == []


@pytest.fixture(scope="module")
def tracked(root) -> list[str]:
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("no git checkout")
    listing = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    return listing.stdout.splitlines()


def test_no_tracked_file_is_ignored(tracked, root):
    """An ignored file that is tracked would be missing from archives."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""


@pytest.fixture(scope="module")
def archives(tracked, root, tmp_path_factory) -> tuple[Path, Path]:
    """sdist, and the wheel made from it, of a clean copy that holds an editable install's links."""
    copy = tmp_path_factory.mktemp("copy")
    for name in tracked:
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    # The links come from the build hook itself, as in `pip install -e .`.
    call = "import hatchling.build as b, sys; b.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", call, str(copy / "out")], cwd=copy, check=True, capture_output=True)
    assert (copy / "build" / "dev" / "bien" / "core" / "api.py").is_file()
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    subprocess.run(build, check=True, capture_output=True)
    (sdist,), (wheel,) = list(out.glob("*.tar.gz")), list(out.glob("*.whl"))
    return sdist, wheel


@pytest.mark.slow
@pytest.mark.packaging
def test_the_sdist_holds_every_tracked_file(archives, tracked):
    with tarfile.open(archives[0]) as tar:
        files = {m.name.split("/", 1)[1] for m in tar.getmembers() if m.isfile()}
    assert sorted(set(tracked) - files) == []
    assert sorted(files - set(tracked)) == ["PKG-INFO"]


@pytest.mark.slow
@pytest.mark.packaging
def test_the_wheel_holds_every_file_of_the_rooms(archives, tracked):
    with zipfile.ZipFile(archives[1]) as wheel:
        files = {n for n in wheel.namelist() if ".dist-info/" not in n}
    rooms = {f"bien/{n}" for n in tracked if n.split("/")[0] in ROOMS and n != "core/_build.py"}
    assert files == rooms
    assert {f"bien/{room}/py.typed" for room in ROOMS} <= files


@pytest.mark.slow
@pytest.mark.packaging
@pytest.mark.timeout(600)
def test_the_wheel_installs_and_every_module_imports(archives, tmp_path):
    """In an environment of its own that sees this one's dependencies, but not its editable bien."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(archives[1])], check=True, capture_output=True)
    names = [
        ".".join(p.relative_to(site).with_suffix("").parts).removesuffix(".__init__")
        for p in sorted((site / "bien").rglob("*.py"))
        if p.name != "__main__.py"
    ]
    code = (
        "import importlib, sys\n"
        "for n in sys.argv[2:]:\n"
        "    m = importlib.import_module(n)\n"
        "    assert m.__file__.startswith(sys.argv[1]), m.__file__\n"
        "from importlib.metadata import distribution\n"
        "assert str(distribution('bien').locate_file('')).startswith(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site), *names],
        cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(names) > 80
