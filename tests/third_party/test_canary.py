"""A package of somebody else's, installed into an environment of its own, is found, checked and served with.

The package stays as it is while bien changes: if it must be edited, the plugin API broke, and the CHANGELOG
says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from bien.core.testing.toy import write_tokenizer, write_toy

PACKAGE = Path(__file__).parent / "bien-canary"

DEPLOYMENT = """
[model]
max_context = 1048576

[gateway]
router = { use = "canary-pinned", most = 4 }

[[pool]]
count = 2
kv_tokens = 200000
scheduler = { use = "canary-shortest", token_budget = 1024 }
executor = { use = "simulated", step_ms = 5.0 }
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bien-canary installed in it, and nothing else."""
    copy = tmp_path_factory.mktemp("source") / PACKAGE.name
    shutil.copytree(PACKAGE, copy)
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command = [*pip, "--no-build-isolation", "--target", str(target), str(copy)]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Run:
    """Run python with the canary on its path; `only` is BIEN_PLUGINS (None: unset)."""

    def call(*args: str, only: str | None = None) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "BIEN_PLUGINS"} | {"PYTHONPATH": str(site)}
        if only is not None:
            env["BIEN_PLUGINS"] = only
        command = [sys.executable, *args]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return call


@pytest.fixture
def bien(run: Run) -> Run:
    return lambda *args, **fields: run("-m", "bien.replay.cli", *args, **fields)


def names(listing: str) -> set[tuple[str, str]]:
    return {(row["distribution"], row["name"]) for row in json.loads(listing)}


CANARY = {("bien-canary", "canary-shortest"), ("bien-canary", "canary-pinned")}


def test_it_is_listed_beside_the_built_in_ones(bien: Run):
    listed = names(bien("plugins", "list", "--json").stdout)
    assert listed >= CANARY | {("bien", "fcfs"), ("bien", "kv-aware")}


def test_it_can_be_left_out(bien: Run):
    assert not names(bien("plugins", "list", "--json", only="").stdout) & CANARY
    router_only = names(bien("plugins", "list", "--json", only="canary-router").stdout) & CANARY
    assert router_only == {("bien-canary", "canary-pinned")}


def test_it_is_checked(bien: Run):
    report = json.loads(bien("plugins", "check", "--json").stdout)
    assert [p for p in report["problems"] if "canary" in p] == []
    assert {p["entry_point"] for p in report["plugins"]} >= {"canary-scheduler", "canary-router"}


def test_it_conforms_by_its_own_tests(run: Run):
    tests = str(PACKAGE / "tests")
    done = run("-m", "pytest", "-q", "--rootdir", tests, "-p", "no:cacheprovider", tests)
    assert done.returncode == 0, done.stdout


def test_its_parameters_are_strict(bien: Run, tmp_path: Path):
    (tmp_path / "d.toml").write_text(DEPLOYMENT.replace("token_budget", "token_bugdet"))
    done = bien("deployment", "check", "d.toml")
    assert done.returncode == 2
    assert "pool[0].scheduler.token_bugdet" in done.stderr
    assert "did you mean 'token_budget'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_deployment_that_selects_it_needs_it(bien: Run, tmp_path: Path):
    (tmp_path / "d.toml").write_text(DEPLOYMENT)
    assert bien("deployment", "check", "d.toml").returncode == 0
    done = bien("deployment", "check", "d.toml", only="")
    assert done.returncode == 2
    assert "no scheduler named 'canary-shortest'" in done.stderr
    assert "BIEN_PLUGINS leaves out" in done.stderr


def test_it_serves_a_simulated_run(bien: Run, tmp_path: Path):
    (tmp_path / "d.toml").write_text(DEPLOYMENT)
    command = ("simulate", "--deployment", "d.toml", "--sessions", "3", "--json", "result.json")
    done = bien(*command)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["turns"]["count"] > 5
    assert result["turns"]["errors"] == 0
    assert result["deployment"]["gateway"]["router"]["use"] == "canary-pinned"
    assert result["deployment"]["pool"][0]["scheduler"]["use"] == "canary-shortest"


def test_it_serves_requests(site: Path, tmp_path: Path):
    """Real worker processes with a toy model: each loads the canary by name and version."""
    write_toy(tmp_path / "toy")
    write_tokenizer(tmp_path / "toy")
    pool = 'count = 2\nthreads = 1\nkv_tokens = 1024\nscheduler = "canary-shortest"\n'
    text = f'[model]\nname = "toy"\n[gateway]\nport = 0\nrouter = "canary-pinned"\n[[pool]]\n{pool}'
    (tmp_path / "d.toml").write_text(text)
    env = {k: v for k, v in os.environ.items() if k != "BIEN_PLUGINS"} | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "bien.replay.cli", "serve", "d.toml"]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith("serving ")), "")
        found = re.search(r"at (http\S+) with 2 workers", line)
        assert found, server.communicate()
        body = {"model": "toy", "prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        for _ in range(3):
            request = urllib.request.Request(
                f"{found[1]}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                usage = json.load(answer)["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 6)
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
        assert server.returncode == 0, errors
    finally:
        server.kill()
        server.wait()
