"""`bien replay --url`: the whole way from the command line to result.json, against a fake server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bien.replay.result import Result, read_result
from bien.traces.model import TraceMeta
from bien.traces.native import write_native
from tests.replay.fake_server import FakeServer
from tests.replay.fakes import session

# Only the one command: the others have tests of their own.
BIEN = "import bien.replay.cli as cli; cli.COMMANDS = ('replay',); cli.main()"


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """Starts fake servers on a loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[FakeServer] = []

    def start(**options: object) -> FakeServer:
        server = FakeServer(**options)  # type: ignore[arg-type]
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        servers.append(server)
        return server

    yield start
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.bien.jsonl"
    sessions = [session(f"s{i}", (0, 50, 4), (0.01, 20, 3), (0.01, 20, 5)) for i in range(3)]
    write_native(path, TraceMeta("native", 16), sessions)
    return path


def bien(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BIEN, "replay", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_a_run_ends_with_a_table_and_a_result(
    serve: Callable[..., FakeServer], trace: Path, tmp_path: Path
) -> None:
    server = serve()
    done = bien(trace, "--url", server.url, "--concurrency", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stdout and "100.0% of turns" in done.stdout
    result: Result = read_result(tmp_path / "result.json")
    assert result.validity.valid, result.validity.reasons
    assert (result.kind, result.turns.count, result.tokens.output) == ("live", 9, 36)
    assert result.deployment == {"url": server.url}
    assert result.router.parity == 2.0  # the fake predicts 32 tokens and finds 16
    assert result.speculation.acceptance_length == 2.5
    assert result.client.cpu_ms_per_request is not None and result.client.send_lag_ms is not None
    assert len(server.requests) == 9


def test_sessions_beyond_the_window_are_counted(serve: Callable[..., FakeServer], tmp_path: Path) -> None:
    sessions = [session("short", (0, 50, 4)), session("long", (0, 5000, 4))]
    write_native(tmp_path / "t.jsonl", TraceMeta("native", 16), sessions)
    done = bien("t.jsonl", "--url", serve().url, "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0
    assert "1 sessions skipped: longer than the window of 4096" in " ".join(done.stdout.split())
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["sessions"]["skipped"] == 1 and not result["validity"]["valid"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_keeps_what_was_measured(
    number: int, serve: Callable[..., FakeServer], tmp_path: Path
) -> None:
    server = serve(delay=0.01)
    write_native(
        tmp_path / "t.jsonl", TraceMeta("native", 16), [session("a", *[(0.0, 50, 4)] * 5, (0.0, 9, 2000))]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", BIEN, "replay", "t.jsonl", "--url", server.url],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while len(server.requests) < 6 and process.poll() is None:
            threading.Event().wait(0.02)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    result = read_result(tmp_path / "result.json")
    assert (result.turns.count, result.turns.unfinished) == (5, 1)
    assert result.validity.reasons[0].startswith("interrupted")
    assert "not valid: interrupted" in out


def test_a_server_that_refuses_everything_fails_the_run(
    serve: Callable[..., FakeServer], tmp_path: Path
) -> None:
    write_native(tmp_path / "t.jsonl", TraceMeta("native", 16), [session("a", (0, 50, 13))])
    done = bien("t.jsonl", "--url", serve().url, cwd=tmp_path)
    assert done.returncode == 1
    result = read_result(tmp_path / "result.json")
    assert result.turns.errors == 1 and result.card.overload == 1.0
    assert result.fidelity.notes == [
        "1 sessions ended early by a failed turn, most often: HTTP 503: 13 is refused"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "no such trace: none.json"),
        (["half.jsonl"], "half.jsonl is cut off"),
        (["/dev/null"], "trace /dev/null is a pipe or device; write .* to a file"),
        (["empty.jsonl"], "trace empty.jsonl is empty"),
        (["t.bien.jsonl", "--token-scale", "1/3"], "token scale 0.333333 is no 1/2.k; valid: 1, 1/2"),
        (["t.bien.jsonl", "--concurrency", "0"], "--concurrency is 0; valid: 1 to 100000"),
        (["t.bien.jsonl", "--url", "http://127.0.0.1:1"], "no server at http://127.0.0.1:1"),
        (["t.bien.jsonl", "--json", "none/r.json"], "cannot write result none/r.json"),
        (["long.jsonl"], "the one session is longer than the window of 8192 .*--token-scale 1/2 "),
        (["t.bien.jsonl", "--deployment", "laptob"], "no built-in deployment 'laptob'; .*'laptop'"),
    ],
)
def test_bad_input_is_one_paragraph(arguments: list[str], message: str, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "half.jsonl").write_bytes(trace.read_bytes()[:-20])
    write_native(tmp_path / "long.jsonl", TraceMeta("native", 16), [session("a", (0, 9000, 1))])
    done = bien(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line
    assert not (tmp_path / "result.json").exists()
