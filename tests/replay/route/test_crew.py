"""Processes that simulate; and the command as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bien.core.deployment import Selection
from bien.core.errors import PluginError
from bien.replay.route.crew import Processes
from bien.replay.route.variant import Seen, Variant
from tests.replay.route.conftest import TREES

COMMAND = [sys.executable, "-m", "bien.replay.cli", "route", "explain"]


def test_a_process_finds_what_is_found_here(sessions, fleet, round_robin: Seen):
    gateway = msgspec.structs.replace(fleet.gateway, router=Selection("round-robin"))
    variant = Variant("round-robin", msgspec.structs.replace(fleet, gateway=gateway), TREES, reasons=True)
    unknown = msgspec.structs.replace(fleet.gateway, router=Selection("nobody"))
    told: list[int] = []
    crew = Processes(sessions, 1)
    try:
        (seen,) = crew.run([variant], lambda _, turns: told.append(turns))
        assert seen == round_robin
        assert told[-1] == len(seen.ids)
        with pytest.raises(PluginError, match="simulating 'x': gateway.router.use: no router named 'nobody'"):
            crew.run([Variant("x", msgspec.structs.replace(fleet, gateway=unknown), 1)], lambda *_: None)
    finally:
        crew.close()


def test_the_command_writes_what_it_shows(tmp_path: Path):
    chosen = ["--policy", "round-robin", "--policy", "sticky", "--workers", "2", "--concurrency", "4"]
    files = ["--json", "r.json", "--plot", "r.png", "--requests", "1", "--jobs", "2"]
    done = subprocess.run(
        [*COMMAND, *chosen, *files], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["schema"] == "bien.route/1" and result["workers"] == 2
    assert set(result["policies"]) == {"round-robin", "sticky"}
    for name, policy in result["policies"].items():
        assert set(policy["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
        assert f"{policy['achieved']:.1%}" in next(x for x in done.stdout.splitlines() if x.startswith(name))
        assert len(policy["costliest"]) == 1
    assert (tmp_path / "r.png").is_file()
    assert done.stderr.strip().splitlines()[-2:] == ["written to r.json", "written to r.png"]


def test_bad_input_is_said_in_a_line_before_anything_runs(tmp_path: Path):
    def error(*arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and not done.stdout, done
        (line,) = done.stderr.splitlines()
        return line

    assert "did you mean 'sticky'?" in error("--policy", "stick")
    assert "is where the result goes" in error("--json", "a.x", "--plot", "a.x")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_processes_too(name: str, tmp_path: Path):
    strike = """
import os, signal, sys
from bien.replay import cli
from bien.replay.route.crew import Processes
start, name = Processes._start, sys.argv.pop(1)
async def started(self):
    child = await start(self)
    print(child.pid, flush=True)
    if len(self._children) == 2:
        os.kill(os.getpid(), getattr(signal, name))
    return child
Processes._start = started
cli.main()
"""
    command = [sys.executable, "-c", strike, name, "route", "explain", "--jobs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done
    assert not done.stderr.strip()
    for pid in map(int, done.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
