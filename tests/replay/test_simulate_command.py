"""`bien simulate`: bad input is one paragraph, and is noticed before a long run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bien.core.deployment import load_deployment
from bien.core.errors import DeploymentError, UserError
from bien.core.plugins import PluginManager
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from bien.replay.simulation import SimulationPlan, with_workers
from bien.replay.simulation import simulate as simulation
from bien.replay.summary import print_summary
from bien.replay.traces import sample_path

MEMORY = "ulimit -v 8000000; exec "


def simulate(*arguments: str, cwd: Path) -> tuple[int, str]:
    command = " ".join([MEMORY, sys.executable, "-m", "bien.replay.cli", "simulate", *arguments])
    done = subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ("kv_tokens = 999999999999", "not enough memory: .*; lower count, kv_tokens or slots"),
        (
            'executor = { use = "simulated", step_ms = -1.0 }',
            r"d\.toml: pool\[0\]\.executor\.step_ms: Expected float >= 0\.0, got -1\.0",
        ),
        (
            'executor = { use = "simulated", step_ms = nan }',
            ".*step_ms: Expected float >= 0",
        ),
        (
            'executor = { use = "simulated", token_ms = inf }',
            ".*token_ms: Expected float <= 1",
        ),
    ],
)
def test_absurd_numbers_in_a_deployment(pool: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(f"[[pool]]\n{pool}\n")
    code, err = simulate("--deployment", "d.toml", cwd=tmp_path)
    assert code == 2
    (line,) = err.splitlines()
    assert re.fullmatch(f"error: {message}.*", line), line


def test_the_result_is_tried_first_and_outlives_a_closed_pipe(tmp_path: Path) -> None:
    code, err = simulate("--json", "none/r.json", cwd=tmp_path)
    assert code == 2 and err.startswith("error: cannot write result none/r.json: No such file"), err
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` leaves it
    command = [sys.executable, "-m", "bien.replay.cli", "simulate", "--sessions", "1"]
    subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.DEVNULL, timeout=60)
    os.close(writer)
    assert (tmp_path / "result.json").is_file()


def test_interrupted_it_keeps_what_was_simulated() -> None:
    deployment = load_deployment("laptop", [EXAMPLES])
    plan = SimulationPlan((), ReplayOptions(concurrency=1, time_scale=100.0), deployment)

    struck: list[int] = []

    def interrupt(driver: Driver) -> None:
        if driver.tally.turns >= 5 and not struck:
            struck.append(driver.tally.turns)
            os.kill(os.getpid(), signal.SIGINT)

    run = simulation(plan, PluginManager.load(), interrupt)
    assert run.interrupted
    assert struck and struck[0] <= run.result.turns.count < 47
    assert run.result.validity.reasons[0].startswith("interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("ladder", [(), ("--ladder", "1,64")])
def test_a_signal_ends_it_with_its_table(number: int, ladder: tuple[str, ...], tmp_path: Path) -> None:
    """Sent as soon as a first turn, or rung, is over."""
    strike = """
import os, signal, sys
from bien.replay import cli, ladder, simulation
number, = map(int, sys.argv.pop(1).split())
seen = [0]
run, busy = simulation._simulate, simulation.Driver.run
if "--ladder" in sys.argv:
    def again(*arguments, **more):
        seen[0] += 1
        if seen[0] == 2:
            os.kill(os.getpid(), number)
        return run(*arguments, **more)
    simulation._simulate = again
else:
    async def some(self):
        self.clock  # a virtual one
        async def soon():
            while not self.tally.turns:
                await self.clock.sleep(1)
            os.kill(os.getpid(), number)
        import asyncio
        task = asyncio.create_task(soon())
        await busy(self)
    simulation.Driver.run = some
cli.main()
"""
    command = [sys.executable, "-c", strike, str(number), "simulate", "--concurrency", "1", *ladder]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done
    assert "Traceback" not in done.stderr
    if ladder:
        assert "Pareto" in done.stdout and (tmp_path / "ladder.png").is_file()
        assert len(json.loads((tmp_path / "ladder.json").read_text())["rungs"]) == 1
    else:
        assert "cache hit" in done.stdout and "written to result.json" in done.stderr
        reasons = json.loads((tmp_path / "result.json").read_text())["validity"]["reasons"]
        assert reasons[0].startswith("interrupted")


def test_what_is_read_or_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    trace = tmp_path / "t.bien.jsonl"
    (tmp_path / "w[" / "x]").mkdir(parents=True)
    trace.write_bytes(sample_path().read_bytes())
    for arguments in (("--json", f"'{trace.name}'"), ("--ladder", "1", "--json", "x.json", "'ladder.json'")):
        if "--ladder" in arguments:
            trace = trace.rename(tmp_path / "ladder.json")
        code, err = simulate(f"'{trace.name}'", *arguments, cwd=tmp_path)
        assert code == 2 and "is read to make the" in err, err
        assert trace.read_bytes() == sample_path().read_bytes()
    code, err = simulate("--report", "r.json", "--json", "r.json", cwd=tmp_path)
    assert code == 2 and "is where the result goes" in err, err
    code, err = simulate("--sessions", "1", "--json", "'w[/x]/r.json'", cwd=tmp_path)
    assert code == 0 and "written to w[/x]/r.json" in err, err


def test_a_time_beyond_reason_is_refused(tmp_path: Path) -> None:
    turn = {"type": "n", "in": 64, "out": 4, "hash_ids": [1], "api_time": 1.0}
    trace = {"id": "x", "block_size": 64, "hash_id_scope": "local"}
    trace["requests"] = [turn | {"t": 0.0}, turn | {"t": 1e300}]  # type: ignore[assignment]
    (tmp_path / "t.json").write_text(json.dumps(trace))
    code, err = simulate("t.json", cwd=tmp_path)
    assert code == 2 and "`$.requests[1].t`" in err, err


def test_workers_are_those_of_the_only_pool() -> None:
    deployment = load_deployment("simulated", [EXAMPLES])
    assert with_workers(deployment, 3).pool[0].count == 3
    two = msgspec.structs.replace(
        deployment, pool=(*deployment.pool, msgspec.structs.replace(deployment.pool[0], name="b"))
    )
    with pytest.raises(UserError, match="--workers is the count of the only pool; .* 'main', 'b'"):
        with_workers(two, 3)
    with pytest.raises(DeploymentError, match="pool"):
        with_workers(deployment, 0)


def test_costs_come_first_and_throughput_is_per_accelerator() -> None:
    deployment = with_workers(load_deployment("kimi-k3-b300", [EXAMPLES]), 2)
    result = simulation(SimulationPlan((), ReplayOptions(), deployment), PluginManager.load()).result
    (costs,) = result.costs
    assert (costs.provenance, costs.machine, costs.accelerators) == ("roofline, uncalibrated", "B300 SXM", 8)
    assert result.throughput.per_accelerator.output == pytest.approx((result.throughput.output or 0) / 16)
    console = Console(record=True, width=200, file=io.StringIO())
    print_summary(result, console)
    first = console.export_text().strip().splitlines()[0]
    assert re.fullmatch(r"costs\s+roofline, uncalibrated: 8 x B300 SXM \(tensor 8, expert 8; .*\)\s*", first)
