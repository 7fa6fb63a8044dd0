"""README's examples run, and its commands are the ones that exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from bien.core.compose import compose
from bien.core.deployment import parse_deployment
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.gateway.routing import RouteRequest, Target
from bien.replay.cli import make_app


@pytest.fixture(scope="module")
def readme(root) -> str:
    return (root / "README.md").read_text()


def blocks(readme: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)


@pytest.fixture
def installed(readme, tmp_path, monkeypatch) -> Iterator[PluginManager]:
    """README's plugin, installed as its own pyproject says."""
    (source,) = blocks(readme, "python")
    (entry,) = [tomllib.loads(b) for b in blocks(readme, "toml") if "entry-points" in b]
    ((name, module),) = entry["project"]["entry-points"]["bien"].items()
    (tmp_path / f"{module}.py").write_text(source)
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[bien]\n{name} = {module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield PluginManager.load(name)
    importlib.invalidate_caches()


def target(worker: str, overlap: int, inflight: int) -> Target:
    return Target(worker, 0, WorkerInfo(worker, "g", "fp"), WorkerStats(), inflight, 0, overlap)


def test_the_plugin_is_short(readme):
    (source,) = blocks(readme, "python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 20


def test_the_plugin_routes(installed):
    deployment = parse_deployment({"gateway": {"router": "longest-prefix"}})
    router = compose(deployment, installed).gateway["router"].make(Context())
    request = RouteRequest("r", "", "", 100, 10, 0, b"")
    targets = [target("a", 16, 0), target("b", 64, 5), target("c", 64, 1)]
    decision = router.choose(request, targets)
    assert (decision.target, decision.predicted_cached) == (2, 64)
    router.close()


def test_the_deployment_composes(readme):
    (remote,) = [b for b in blocks(readme, "toml") if "engine =" in b]
    [(_, engine)] = compose(parse_deployment(tomllib.loads(remote)), PluginManager.load("")).remote
    assert engine.provider.name == "vllm"
    (example,) = [b for b in blocks(readme, "toml") if "[[pool]]" in b and b != remote]
    composition = compose(parse_deployment(tomllib.loads(example)), PluginManager.load(""))
    assert composition.gateway["router"].config.ms_per_prefill_token == 0.4
    assert set(composition.pools[0].parts) >= {"scheduler", "executor", "speculator"}


def test_the_table_names_what_is_built_in(readme):
    manager = PluginManager.load("")
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", readme, re.MULTILINE)
    told = {kind: set(re.findall(r"`([\w-]+)`", names)) for kind, names in rows}
    assert told == {kind: set(manager.names(kind)) for kind in told}


def test_linked_files_exist(readme, root):
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert (root / link).exists(), link


def test_named_paths_exist(readme, root):
    for path in re.findall(r"`((?:core|gateway|traces|replay|plugins|tests)/[\w./-]*)`", readme):
        assert (root / path).exists(), path


def test_commands_and_options_exist(readme):
    """Every `bien …` line of a shell block names a command with these options."""
    root: Any = typer.main.get_command(make_app())
    lines = [line for b in blocks(readme, "sh") for line in re.findall(r"\bbien (.+?)(?:  |$)", b, re.M)]
    assert len(lines) >= 5
    for line in lines:
        words = line.split()
        command = root
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        known = {option for p in command.params for option in p.opts}
        assert {w for w in words if w.startswith("--")} <= known, line
