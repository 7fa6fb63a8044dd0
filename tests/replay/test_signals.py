"""SIGTERM and SIGINT at any moment: `bien serve` and `bien replay` end, and all that they started ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from bien.core.testing.toy import write_toy
from bien.traces.model import TraceMeta
from bien.traces.native import write_native
from tests.replay.fakes import session

LONG = 100_000  # tokens: more than will be made before the signal
HANGS = """
import sys, time
open(sys.argv[sys.argv.index("--dest") + 1] + "/half.whl", "wb").write(b"half")
time.sleep(600)
"""


class Command:
    """A running `bien …`."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bien.replay.cli", *arguments],
            cwd=folder,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started: set[psutil.Process] = set()

    def children(self) -> set[psutil.Process]:
        """Everything below it, now."""
        try:
            self.started |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            pass
        return self.started

    def until(self, condition: Callable[[], bool]) -> None:
        while self.process.poll() is None and not condition():
            psutil.wait_procs([], timeout=0.01)
        assert self.process.poll() is None, self.process.communicate()

    def strike(self, number: int) -> int:
        """Exit code; AssertionError when something is left behind."""
        started = self.children()
        assert started
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=20)
        assert "Traceback" not in err, err
        left = [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, left
        return self.process.returncode

    def kill(self) -> None:
        for process in (*self.children(), psutil.Process(self.process.pid)):
            if process.is_running():
                process.kill()
        self.process.communicate()


Start = Callable[..., Command]


@pytest.fixture
def bien(tmp_path: Path) -> Iterator[Start]:
    """Starts commands in a folder with toy.toml and long.bien.jsonl."""
    write_toy(tmp_path / "toy", max_position_embeddings=2 * LONG)
    (tmp_path / "toy.toml").write_text(
        f'[model]\nname = "{tmp_path / "toy"}"\n[gateway]\nport = 0\n'
        f"[[pool]]\ncount = 2\nthreads = 1\nslots = 2\nkv_tokens = {2 * LONG}\n"
    )
    write_native(tmp_path / "long.bien.jsonl", TraceMeta("native", 16), [session("a", (0, 50, LONG))])
    commands: list[Command] = []

    def start(*arguments: str, **env: str) -> Command:
        commands.append(Command(tmp_path, *arguments, **env))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            command.kill()


SERVE, REPLAY = ("serve", "toy.toml"), ("replay", "long.bien.jsonl", "--deployment", "toy.toml")


def workers(command: Command) -> int:
    """How many worker processes there are."""
    count = 0
    for process in command.children():
        try:
            count += "bien.core.worker" in process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
    return count


def serving(command: Command) -> str:
    """Its URL, when it serves."""
    assert command.process.stdout is not None
    line = command.process.stdout.readline()
    found = re.fullmatch(r"serving toy at (http://127.0.0.1:\d+)/v1 with 2 workers\n", line)
    assert found, line
    return found[1]


def ask(url: str, tokens: int) -> http.client.HTTPResponse:
    body = {"model": "toy", "prompt": [5] * 40, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=60)
    return answer


def refused(call: Callable[[], http.client.HTTPResponse]) -> bool:
    """Whether it is told to come back later."""
    try:
        call().close()
    except urllib.error.HTTPError as error:
        assert (error.code, error.headers["Retry-After"]) == (503, "1")
        return True
    return False


def metrics(command: Command) -> str:
    """The gateway's page; empty until it serves."""
    for process in command.children():
        try:
            if "bien.replay.stack_process" not in process.cmdline():
                continue
            for connection in process.net_connections():
                if connection.status == psutil.CONN_LISTEN:
                    url = f"http://127.0.0.1:{connection.laddr.port}/metrics"
                    with urllib.request.urlopen(url, timeout=60) as page:
                        return str(page.read(), "utf-8")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
    return ""


@pytest.mark.parametrize(
    ("arguments", "number", "code"), [(SERVE, signal.SIGTERM, 0), (REPLAY, signal.SIGTERM, 130)]
)
def test_while_workers_load(bien: Start, arguments: tuple[str, ...], number: int, code: int) -> None:
    command = bien(*arguments)
    command.until(lambda: workers(command) > 0)
    assert command.strike(number) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments", [("serve",), ("replay",)])
def test_while_the_model_is_fetched(
    bien: Start, arguments: tuple[str, ...], number: int, tmp_path: Path
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pip.py").write_text(HANGS)
    env = {"PYTHONPATH": str(tmp_path / "fake"), "BIEN_CACHE": str(tmp_path / "cache")}
    command = bien(*arguments, **env)
    models = tmp_path / "cache" / "models"
    command.until(lambda: bool(list(models.glob(".*/half.whl"))))
    assert command.strike(number) == (0 if arguments == ("serve",) else 130)
    assert [path.name for path in models.iterdir()] == ["smollm2-135m.lock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_an_answer_streams(bien: Start, number: int) -> None:
    """The first signal drains: that answer goes on and new ones are refused. The second one ends it."""
    command = bien(*SERVE)
    url = serving(command)
    with ask(url, LONG) as answer:
        assert answer.readline().startswith(b"data: ")
        command.process.send_signal(number)
        command.until(lambda: refused(lambda: urllib.request.urlopen(f"{url}/ready", timeout=60)))
        assert refused(lambda: ask(url, 1))
        assert answer.readline() and answer.readline().startswith(b"data: ")
        assert command.strike(number) == 0
        assert b'"overloaded"' in answer.read().splitlines()[-2]


def test_an_answer_under_way_ends_before_the_server(bien: Start) -> None:
    command = bien(*SERVE)
    with ask(serving(command), 700) as answer:
        assert answer.readline().startswith(b"data: ")
        assert command.strike(signal.SIGTERM) == 0
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_while_a_replay_streams(bien: Start, tmp_path: Path) -> None:
    command = bien(*REPLAY)
    command.until(lambda: "bien_http_streams 1.0" in metrics(command))
    assert command.strike(signal.SIGTERM) == 130
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["turns"]["unfinished"] == 1
    assert result["validity"]["reasons"][0].startswith("interrupted")


AT_THE_END = """
import os, signal
import bien.replay.cli as cli

class Late:  # goes when Python has put its own handlers away
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)

def app():
    os.kill(os.getpid(), signal.SIGINT)

late = Late()
cli.make_app = lambda: app
cli.main()
"""


def test_one_more_interrupt_while_python_ends_keeps_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


IN_AN_IMPORT = """
import os, signal, sys

class Strikes:
    def find_spec(self, name, path=None, target=None):
        if name == struck:
            os.kill(os.getpid(), signal.SIGINT)
            sys.stdout.write("it went on")

struck, sys.argv[1:] = sys.argv[1], ["--version"]
sys.meta_path.insert(0, Strikes())
from bien.replay.entry import main
main()
"""


@pytest.mark.parametrize("module", ["bien.replay.cli", "typer", "bien.replay.commands.validate"])
def test_an_interrupt_in_an_import_says_nothing(module: str) -> None:
    command = [sys.executable, "-c", IN_AN_IMPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    ignores = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + IN_AN_IMPORT
    command = [sys.executable, "-c", ignores, "typer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("it went on"), done


def test_the_command_begins_there() -> None:
    (point,) = entry_points(group="console_scripts", name="bien")
    assert point.value == "bien.replay.entry:main"
