"""`bien plugins` and `bien deployment`: what they print and how they end."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from bien.core.errors import DeploymentError, ResourceError
from bien.core.providers import KINDS
from bien.replay.commands import deployment, plugins


@pytest.fixture
def run():
    app = typer.Typer()
    plugins.register(app)
    deployment.register(app)
    return lambda *args: CliRunner().invoke(app, list(args))


def test_list_names_every_provider_with_its_origin(run):
    result = run("plugins", "list", "--json")
    rows = json.loads(result.stdout)
    assert {row["kind"] for row in rows} <= set(KINDS)
    (fcfs,) = [row for row in rows if row["name"] == "fcfs"]
    assert fcfs["distribution"] == "bien"
    assert "token_budget" in fcfs["parameters"]
    assert "fcfs" in run("plugins", "list").stdout


def test_check_is_content_with_the_built_in_plugins(run):
    result = run("plugins", "check", "--json")
    report = json.loads(result.stdout)
    assert report["problems"] == []
    assert result.exit_code == 0
    assert "0 problems" in run("plugins", "check").stdout


def test_check_finds_a_broken_plugin(run, tmp_path, monkeypatch):
    (tmp_path / "acme_broken.py").write_text("import no_such_module")
    info = tmp_path / "acme_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bien]\nacme = acme_broken\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("BIEN_PLUGINS")
    result = run("plugins", "check")
    assert result.exit_code == 1
    assert "problem: plugin 'acme' of acme-broken 1.0 failed to import" in result.stdout


def test_check_says_as_json_that_two_entry_points_share_a_name(run, tmp_path, monkeypatch):
    for name in ("acme-one", "acme-two"):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[bien]\nacme = {info.name[:8]}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("BIEN_PLUGINS")
    result = run("plugins", "check", "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert "entry point 'acme' (group 'bien') is defined twice" in problem
    assert "acme-one" in problem and "acme-two" in problem
    assert result.exit_code == 1


def test_deployment_check_describes_what_would_start(run, tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('[[pool]]\ncount = 2\nscheduler = { use = "fcfs", token_budget = 64 }\n')
    result = run("deployment", "check", str(path))
    assert result.exit_code == 0, result.exception
    assert "pool main: 2 x both" in result.stdout
    assert "scheduler: fcfs (token_budget=64" in result.stdout
    assert "router: kv-aware" in result.stdout


def test_deployment_check_refuses_with_the_path(run, tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('[[pool]]\nscheduler = { use = "fcfs", token_bugdet = 64 }\n')
    result = run("deployment", "check", str(path))
    assert isinstance(result.exception, DeploymentError)
    assert str(result.exception).startswith(f"{path}: pool[0].scheduler.token_bugdet: ")
    assert result.exception.field == "pool[0].scheduler.token_bugdet"
    assert "did you mean 'token_budget'?" in str(result.exception)


def test_every_shipped_deployment_is_sound(run):
    names = [path.stem for path in deployment.EXAMPLES.glob("*.toml")]
    for name in names:
        result = run("deployment", "check", name)
        assert result.exit_code == 0, result.exception


def test_deployment_check_counts_what_it_takes(run, tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('[host]\nmemory = "2GiB"\n[[pool]]\nkv_memory = "100MiB"\n')
    result = run("deployment", "check", str(path))
    assert result.exit_code == 0, result.exception
    assert "KV of 105 MB" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.split()[:3] == ["main", "1", "x"])
    assert row.split()[3] == "2,256", "tokens of 46,080 bytes"
    assert "warning: pool 'main': KV holds 2,256 tokens, less than the context window" in result.stdout
    path.write_text('[host]\nmemory = "1GiB"\n')
    result = run("deployment", "check", str(path))
    assert isinstance(result.exception, ResourceError)
    path.write_text('[model]\nname = "not/here"\n')
    result = run("deployment", "check", str(path))
    assert result.exit_code == 0 and "memory is not checked: model 'not/here'" in result.stdout
